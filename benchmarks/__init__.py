"""How fast diglot trains beside its peers: see README.md here, and docs/speed.md for what is measured and how."""
