"""Where replicas are in object storage: in S3, or in what `make long` tries in its place."""

import base64
import hashlib
import hmac
import http.client
import json
import os
import time
import urllib.request
from email.utils import formatdate
from pathlib import Path
from typing import ClassVar
from urllib.parse import urlsplit

import obstore

import stores
from faulty_proxy import Faults
from s3_server import S3Server, Server, free_port

# By `make long`, which installs them.
_TOOLS = Path(__file__).parents[2] / ".state" / "tools"
_AZURITE = _TOOLS / "azurite" / "node_modules" / "azurite" / "dist" / "src" / "blob" / "main.js"


class Stored:
    """A bucket of S3: `replicate` is given a proxy that fails requests.

    Args:
        place: The address of the server, and the name of the bucket.
        faults: The proxy, a `faulty_proxy.Faults`.
    """

    Server = S3Server
    scheme = "s3"
    secret = stores.SECRET
    # Options that are wrong, and what is said of them.
    wrong: ClassVar = {
        "bucket": ({}, "the bucket does not exist"),
        "endpoint": ({"aws_endpoint_url": "http://127.0.0.1:1"}, "aws_endpoint_url"),
        "plain HTTP": ({"aws_allow_http": "false"}, "allow_http"),
        "name": ({"aws_regoin": "x"}, "aws_regoin"),
    }
    # What the storage answers, and what is said of it.
    answers: ClassVar = {
        "InvalidAccessKeyId": (403, "credentials"),
        "SignatureDoesNotMatch": (403, "credentials"),
        "RequestTimeTooSkewed": (403, "clock"),
        "AuthorizationHeaderMalformed": (400, "region"),
        "AccessDenied": (403, "role"),
    }
    # The same of an Iceberg table.
    wrong_iceberg: ClassVar = {
        "bucket": ({"warehouse": "s3://nowhere/lake"}, "the bucket does not exist"),
        "endpoint": ({"s3.endpoint": "http://127.0.0.1:1"}, "s3.endpoint"),
    }

    def __init__(self, place, faults):
        self.place, self.faults = place, faults

    @property
    def url(self):
        """The bucket."""
        return f"{self.scheme}://{self.place['bucket']}"

    @staticmethod
    def make(place):
        """Makes the bucket."""
        stores.make_bucket(place)

    def options(self, endpoint):
        return {
            "aws_access_key_id": "test",
            "aws_secret_access_key": self.secret,
            "aws_region": "us-east-1",
            "aws_endpoint_url": endpoint,
            "aws_allow_http": "true",
        }

    def of_iceberg(self, endpoint):
        """Gives the properties of a catalog."""
        return {
            "warehouse": f"{self.url}/lake",
            "s3.endpoint": endpoint,
            "s3.access-key-id": "test",
            "s3.secret-access-key": self.secret,
            "s3.region": "us-east-1",
        }

    @property
    def to_write(self):
        return self.options(self.faults.url)

    @property
    def to_read(self):
        return self.options(self.place["endpoint"])

    @property
    def store(self):
        """The bucket, as obstore opens it."""
        config = {name: value for name, value in self.to_read.items() if "allow_http" not in name}
        return obstore.store.from_url(self.url, config=config, client_options={"allow_http": True})

    def objects(self, prefix):
        """Gives the names of all objects below a prefix."""
        return [each["path"] for page in obstore.list(self.store, prefix) for each in page]

    def get(self, name):
        return bytes(obstore.get(self.store, name).bytes())

    def copy(self, name, to):
        obstore.put(self.store, to, self.get(name), use_multipart=False)


class AzureServer(Server):
    """Azurite, which looks at signatures."""

    def __init__(self):
        port = free_port()
        command = [
            *["node", _AZURITE, "--blobHost", "127.0.0.1", "--blobPort", str(port)],
            *["--inMemoryPersistence", "--skipApiVersionCheck", "--disableTelemetry", "--silent"],
        ]
        accounts = f"{StoredInAzure.account}:{StoredInAzure.secret}"
        super().__init__(port, command, {"AZURITE_ACCOUNTS": accounts})


class StoredInAzure(Stored):
    """A container of Azure."""

    Server = AzureServer
    scheme = "az"
    account, secret = "lakes", base64.b64encode(stores.SECRET.encode()).decode()
    wrong: ClassVar = {
        "bucket": ({}, "the bucket does not exist"),
        "endpoint": (
            {"azure_storage_endpoint": "http://127.0.0.1:1/lakes"},
            "azure_storage_endpoint",
        ),
        "plain HTTP": ({"azure_allow_http": "false"}, "allow_http"),
        "name": ({"azure_storage_acount_name": "x"}, "azure_storage_acount_name"),
        "key": ({"azure_storage_account_key": "a2V5"}, "the credentials are refused"),
        "text": ({"azure_storage_account_key": "a key"}, "Invalid Access Key"),
    }
    answers: ClassVar = {
        "AuthenticationFailed": (403, "credentials"),
        "AuthorizationPermissionMismatch": (403, "role"),
    }
    wrong_iceberg: ClassVar = {
        "bucket": ({"warehouse": "abfss://nowhere/lake"}, "the bucket does not exist"),
        "endpoint": (
            {"adls.blob-storage-authority": "127.0.0.1:1"},
            "adls.blob-storage-authority",
        ),
        "key": ({"adls.account-key": "a2V5"}, "the credentials are refused"),
    }

    @classmethod
    def make(cls, place):
        path, date, version = (
            f"/{cls.account}/{place['bucket']}",
            formatdate(usegmt=True),
            "2021-08-06",
        )
        signed = "\n".join(
            [
                *["PUT", *([""] * 11), f"x-ms-date:{date}", f"x-ms-version:{version}"],
                *[f"/{cls.account}{path}", "restype:container"],
            ]
        )
        key = hmac.new(base64.b64decode(cls.secret), signed.encode(), hashlib.sha256)
        signature = base64.b64encode(key.digest()).decode()
        connection = http.client.HTTPConnection(urlsplit(place["endpoint"]).netloc)
        connection.request(
            "PUT",
            f"{path}?restype=container",
            headers={
                "x-ms-date": date,
                "x-ms-version": version,
                "Authorization": f"SharedKey {cls.account}:{signature}",
            },
        )
        answer = connection.getresponse()
        assert answer.status == 201, answer.read()
        connection.close()

    def options(self, endpoint):
        return {
            "azure_storage_account_name": self.account,
            "azure_storage_account_key": self.secret,
            "azure_storage_endpoint": f"{endpoint}/{self.account}",
            "azure_allow_http": "true",
        }

    def of_iceberg(self, endpoint):
        at = urlsplit(endpoint).netloc
        return {
            # As Arrow takes it.
            "warehouse": f"abfss://{self.place['bucket']}/lake",
            "py-io-impl": "pyiceberg.io.pyarrow.PyArrowFileIO",
            "adls.account-name": self.account,
            "adls.account-key": self.secret,
            "adls.blob-storage-authority": at,
            "adls.blob-storage-scheme": "http",
            "adls.dfs-storage-authority": at,
            "adls.dfs-storage-scheme": "http",
        }


class GoogleServer(Server):
    """fake-gcs-server, which looks at no credentials, behind what obstore needs of the XML API."""

    def __init__(self):
        port = free_port()
        at = f"127.0.0.1:{port}"
        command = [
            *[_TOOLS / "bin" / "fake-gcs-server", "-scheme", "http", "-backend", "memory"],
            *["-host", "127.0.0.1", "-port", str(port), "-public-host", at],
            *["-external-url", f"http://{at}", "-log-level", "error"],
        ]
        super().__init__(port, command)
        self._front = Faults(self.address, takes_json=True)
        self.address = self._front.url

    def close(self):
        self._front.close()
        super().close()


class StoredInGoogle(Stored):
    """A bucket of Google Cloud Storage."""

    Server = GoogleServer
    scheme = "gs"
    wrong: ClassVar = {
        "endpoint": ({"google_base_url": "http://127.0.0.1:1"}, "google_base_url"),
        "plain HTTP": ({"allow_http": "false"}, "allow_http"),
        "name": ({"google_bukcet": "x"}, "google_bukcet"),
        "key": ({"google_service_account_key": "canary-8f1c2e"}, "service account"),
    }
    answers: ClassVar = {"Unauthorized": (401, "credentials"), "AccessDenied": (403, "role")}
    wrong_iceberg: ClassVar = {
        "bucket": ({"warehouse": "gs://nowhere/lake"}, "the bucket does not exist"),
        "endpoint": ({"gcs.service.host": "http://127.0.0.1:1"}, "gcs.service.host"),
    }

    @staticmethod
    def make(place):
        data = json.dumps({"name": place["bucket"]}).encode()
        urllib.request.urlopen(f"{place['endpoint']}/storage/v1/b?project=test", data).close()

    def options(self, endpoint):
        key = {
            "gcs_base_url": endpoint,
            "disable_oauth": True,
            "client_email": "",
            "private_key": self.secret,
            "private_key_id": "",
        }
        return {"google_service_account_key": json.dumps(key), "allow_http": "true"}

    def of_iceberg(self, endpoint):
        return {
            "warehouse": f"{self.url}/lake",
            "gcs.service.host": endpoint,
            "gcs.oauth2.token": self.secret,
            "gcs.oauth2.token-expires-at": str(int(time.time() * 1000) + 86_400_000),
        }


STORAGES = {"s3": Stored, "azure": StoredInAzure, "google": StoredInGoogle}
CHOSEN = STORAGES[os.environ.get("DCP_STORAGE", "s3")]
