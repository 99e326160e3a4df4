"""A REST catalog of Iceberg tables in S3, which is that of Iceberg's own tests."""

import os
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path

import stores
from s3_server import free_port

_JARS = Path(__file__).parents[2] / ".state" / "iceberg"
_JAVA = ["java", "-Xmx256m", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Xshare:auto"]


class RestCatalog:
    """A catalog in a process of its own, with its tables in memory and their metadata in S3.

    Args:
        place: What the fixture `s3_bucket` gives.
    """

    def __init__(self, place):
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        settings = {
            "rest.port": str(port),
            "warehouse": f"s3://{place['bucket']}/lake",
            "uri": "jdbc:sqlite:file:catalog?mode=memory&cache=shared",
            "io-impl": "org.apache.iceberg.aws.s3.S3FileIO",
            "s3.endpoint": place["endpoint"],
            "s3.path-style-access": "true",
            "s3.access-key-id": "test",
            "s3.secret-access-key": stores.SECRET,
            "client.region": "us-east-1",
        }
        # Its names of them.
        settings = {
            f"CATALOG_{name.replace('-', '__').replace('.', '_').upper()}": value
            for name, value in settings.items()
        }
        main = "org.apache.iceberg.rest.RESTCatalogServer"
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with it
        self._process = subprocess.Popen(
            [*_JAVA, "-cp", f"{_JARS}/*", main],
            env=os.environ | settings,
            stdout=self._log,
            stderr=self._log,
        )
        self._wait()

    def _wait(self):
        end = time.monotonic() + 60
        while True:
            assert self._process.poll() is None, self._told()
            try:
                urllib.request.urlopen(f"{self.url}/v1/config").close()
            except OSError:
                assert time.monotonic() < end, self._told()
                time.sleep(0.05)
            else:
                return

    def _told(self):
        self._log.seek(0)
        return self._log.read().decode()

    def close(self):
        self._process.kill()
        self._process.wait()
        self._log.close()
