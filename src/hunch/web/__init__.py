"""The page the server shows at /: plain files, no build."""
