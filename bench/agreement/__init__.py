"""Another load generator on the same server: do its figures agree with ours?"""
