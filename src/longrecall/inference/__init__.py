"""Running a model without gradients: captured decoding steps, prompts in captured segments, generate().

Importing any part of it puts the captured loop into generate() (`generation.py`).
"""

from longrecall.inference import generation as generation
