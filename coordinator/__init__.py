"""The coordinator: gateway, request lifecycle, admission, routing, pool registry, launch. Knows no tensor, no transport."""
