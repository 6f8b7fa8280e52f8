"""The same load on several servers, one after the other and again, and what can be said of their differences."""
