"""Model files: what is known of them, which belong together, and whether they fit into memory."""

from .pairing import find_drafter, target_path

__all__ = ["find_drafter", "target_path"]
