"""A DB-API driver with InnoDB's isolation level REPEATABLE READ, on top of sqlite3.

In a transaction, queries see the data as of its first query, and what the transaction has written
itself. Updates see what others have committed since.
"""

import contextlib
import sqlite3

paramstyle = "qmark"
Error = sqlite3.Error


class Connection:
    def __init__(self, path, *, counts):
        self._path, self._counts = path, counts
        self.now = sqlite3.connect(path, timeout=30)
        self._seen, self._written = None, []

    def cursor(self):
        return Cursor(self, counts=self._counts)

    def seen(self):
        if self._seen is None:
            self._seen = sqlite3.connect(":memory:")
            with contextlib.closing(sqlite3.connect(self._path)) as committed:
                committed.backup(self._seen)
            for statement, values in self._written:
                self._seen.execute(statement, values)
        return self._seen

    def write(self, statement, values):
        changed = self.now.execute(statement, values).rowcount
        if changed:
            self._written.append((statement, values))
            if self._seen is not None:
                self._seen.execute(statement, values)
        return changed

    def commit(self):
        self.now.commit()
        self._end()

    def rollback(self):
        self.now.rollback()
        self._end()

    def _end(self):
        if self._seen is not None:
            self._seen.close()
        self._seen, self._written = None, []

    def close(self):
        self._end()
        self.now.close()


class Cursor:
    def __init__(self, connection, *, counts):
        self._connection, self._counts = connection, counts
        self._found = []
        self.rowcount = -1

    def execute(self, statement, values=()):
        if statement.startswith("SELECT"):
            self._found = self._connection.seen().execute(statement, values).fetchall()
        else:
            self.rowcount = self._connection.write(statement, values)

    def executemany(self, statement, rows):
        """Counts the rows of all statements, of the last one, or none: drivers differ."""
        counted = []
        for row in rows:
            self.execute(statement, row)
            counted.append(self.rowcount)
        self.rowcount = {"all": sum(counted), "last": counted[-1], "none": -1}[self._counts]

    def fetchall(self):
        return self._found

    def close(self):
        pass
