"""Run the command ``ring-attn`` as ``python -m ring_attn_cli``, for use when its script is not on the path."""

from .main import main

if __name__ == "__main__":
    main()
