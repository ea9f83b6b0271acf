"""The command ``ring-attn`` (``main.py``): each subcommand has a folder, and ``processes.py`` starts processes for ranks."""
