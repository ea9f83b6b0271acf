"""What a kernel needs to know, framework-neutral: the problem, the backends that may solve it, tile sizes."""
