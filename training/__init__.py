"""How the recurrent drafter was made: `make drafter`."""
