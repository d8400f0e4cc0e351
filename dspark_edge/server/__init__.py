"""python -m dspark_edge.server: an OpenAI-compatible server with continuous batching.

guard.py lets a request in, schemas.py reads it, chat.py and completions.py answer it, hub.py has
the model, and engine_thread.py is the only thread that enters the engine.
"""
