"""The command ``ring-attn`` (``main.py``): each of its commands is a folder, and ``processes.py`` starts their ranks."""
