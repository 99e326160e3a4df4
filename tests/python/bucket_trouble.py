"""What happens to the collections of a bucket while each is kept in step with a table."""

from inferred import lost, rows_of
from trouble import Trouble

# Two are there all the time, and two have documents with ever new fields. One is created anew again
# and again. Of the last three, one is dropped and two are created in each round.
STEADY = ("_default._default", "inventory.route")
EVOLVING = ("inventory.airline", "inventory.hotel")
RECREATED = "inventory.landmark"
PASSING = ("inventory.first", "inventory.second", "inventory.third")


class OfABucket(Trouble):
    """Trouble in eight collections, round after round.

    A round is what happens before a writer dies and what happens after it.

    Args:
        cluster: The cluster, which has none of the collections.
        seed: Decides what happens.
    """

    def __init__(self, cluster, seed):
        self._existing, *self._absent = PASSING
        there = (*STEADY, *EVOLVING, RECREATED, self._existing)
        super().__init__(cluster, seed, there)
        cluster.create_scope("inventory")
        for name in there[1:]:
            cluster.create_collection(name)
        self._fields = 2

    def write(self):
        for _ in range(10):
            number = self.chance.randrange(10**9)
            value = {"n": number}
            name = self.chance.choice(self.collections), f"key_{self.chance.randrange(400)}"
            if name[0] in EVOLVING:
                other = self.chance.choice([number, number, number, number / 8, str(number), True])
                value[f"field_{self.chance.randrange(self._fields)}"] = other
            self.upsert(name[1], value, name[0])

    def before_death(self):
        """Does a round's first part, which ends with a failover that loses a tail."""
        self._cause_some()
        self._create(self._absent[0])
        self._drop(self._existing)
        self._drop(RECREATED)
        self._cause_some()
        self._create(RECREATED)
        self._cause_some()
        self.fail_over()

    def after_death(self):
        """Does its second part, between the tables that were committed and those that were not."""
        self._create(self._absent[1])
        self._cause_some()
        if self.chance.random() < 0.5:
            self.fail_over()

    def end_round(self):
        """Leaves one of the passing collections, another one than before."""
        self._existing, *self._absent = *self._absent, self._existing
        self._drop(self._absent[0])

    def _cause_some(self):
        # Some of them appear in no other round.
        self._fields += 1
        for _ in range(5):
            self.cause()

    def _create(self, name):
        self.cluster.create_collection(name)
        self.collections += (name,)
        for _ in range(3):
            self.write()

    def _drop(self, name):
        self.cluster.drop_collection(name)
        self.written.keys = {each for each in self.written.keys if each[0] != name}
        self.collections = tuple(each for each in self.collections if each != name)

    def assert_was_committed(self, replica, before):
        """See `Trouble`; of rows that have fields of documents as columns."""
        rows, now = rows_of(replica), self.written.documents()
        for name, row in rows.items():
            assert any(not lost(text, row) for text in self.versions[name]), row
        if replica.mode == "table":
            # A log that was rolled back has the rest of its vBucket only later.
            kept = {name: text for name, text in now.items() if before.get(name) == text}
            assert kept.keys() <= rows.keys()
            wrong = [(text, rows[name]) for name, text in kept.items() if lost(text, rows[name])]
            assert not wrong, wrong
