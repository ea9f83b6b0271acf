"""``python -m ring_attn_cli``: the command ``ring-attn`` where its script is not on the path."""

from .main import main

if __name__ == "__main__":
    main()
