"""Trains a drafter for any GGUF target that llama.cpp can tap. Needs the extra `distill`."""
