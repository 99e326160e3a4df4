"""What a page of metrics says."""

from prometheus_client.parser import text_string_to_metric_families as prometheus


def values(page, parse=prometheus):
    """Gives the value of each series by its name and its own labels."""
    found = {}
    for family in parse(page):
        for sample in family.samples:
            own = [v for k, v in sample.labels.items() if k not in {"bucket", "stream"}]
            found[sample.name, *own] = sample.value
    return found
