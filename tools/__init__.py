"""What developers run to check and describe the code. Never installed; may import `penstock`, never the other way."""
