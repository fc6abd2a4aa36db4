"""The recurrent drafter, and how it was made: `make drafter`."""
