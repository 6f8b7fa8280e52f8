"""The coordinator: gateway, request lifecycle, admission, routing, registry, launch. Knows no tensor, no transport."""
