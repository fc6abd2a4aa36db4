"""Many devices: a cache in shards, and the ways to merge what each device has seen of it."""
