"""The methods of surgery, one file each: what it declares, and its functions `plan` and `transform`."""
