"""The methods of surgery, one file each: what it declares, and its functions `plan` and `transform`.

Help texts are made of the declarations, so the files import torch inside the functions that use it.
"""
