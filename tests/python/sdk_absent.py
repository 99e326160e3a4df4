"""Calls of the Couchbase SDK to services and features that the embedded cluster does not have.

The names are those of docs/guides/sdks.md.
"""

from couchbase.kv_range_scan import PrefixScan, RangeScan, SamplingScan
from couchbase.management.analytics import S3ExternalAnalyticsLink
from couchbase.management.eventing import EventingFunction
from couchbase.management.search import SearchIndex
from couchbase.management.users import Group, Role, User
from couchbase.management.views import DesignDocument
from couchbase.search import MatchAllQuery, SearchRequest
from couchbase.vector_search import VectorQuery, VectorSearch

from sdk_case import PRODUCTION, Try


def everything():
    return SearchRequest.create(MatchAllQuery())


def vectors():
    return SearchRequest.create(VectorSearch.from_vector_query(VectorQuery("v", [1.0])))


# What a cluster that has a data service only does not do.
ABSENT: dict[str, list[Try]] = {
    "`scan`": [
        lambda case: list(case.collection.scan(RangeScan())),
        lambda case: list(case.collection.scan(PrefixScan("a"))),
        lambda case: list(case.collection.scan(SamplingScan(3))),
    ],
    "`query`, of the cluster and of a scope": [
        lambda case: case.sdk.query("SELECT 1").execute(),
        lambda case: case.scope.query("SELECT 1").execute(),
    ],
    "`query_indexes()`": [
        lambda case: case.sdk.query_indexes().get_all_indexes("default"),
        lambda case: case.sdk.query_indexes().create_primary_index("default"),
        lambda case: case.collection.query_indexes().get_all_indexes(),
    ],
    "`Cluster.search`": [
        lambda case: list(case.sdk.search("index", everything()).rows()),
    ],
    "`Scope.search`, `search` for vectors": [
        lambda case: list(case.scope.search("index", everything()).rows()),
        lambda case: list(case.sdk.search("index", vectors()).rows()),
    ],
    "`search_indexes()`": [
        lambda case: case.sdk.search_indexes().get_all_indexes(),
        lambda case: case.sdk.search_indexes().upsert_index(
            SearchIndex(name="index", source_name="default")
        ),
        lambda case: case.scope.search_indexes().get_all_indexes(),
    ],
    "`analytics_query`, of the cluster and of a scope": [
        lambda case: list(case.sdk.analytics_query("SELECT 1").rows()),
        lambda case: list(case.scope.analytics_query("SELECT 1").rows()),
    ],
    "`analytics_indexes()`": [
        lambda case: case.sdk.analytics_indexes().get_all_datasets(),
        lambda case: case.sdk.analytics_indexes().create_dataverse("verse"),
        lambda case: case.sdk.analytics_indexes().create_link(
            S3ExternalAnalyticsLink("verse", "link", "id", region="eu", secret_access_key="key")
        ),
    ],
    "`view_query`": [
        lambda case: list(case.bucket.view_query("design", "view").rows()),
    ],
    "`view_indexes()`: one design document": [
        lambda case: case.bucket.view_indexes().get_design_document("design", PRODUCTION),
        lambda case: case.bucket.view_indexes().upsert_design_document(
            DesignDocument(name="design", views={}), PRODUCTION
        ),
    ],
    "`eventing_functions()`, of the cluster and of a scope": [
        lambda case: case.sdk.eventing_functions().get_all_functions(),
        lambda case: case.sdk.eventing_functions().upsert_function(
            EventingFunction("function", code="", version="7.1.0")
        ),
        lambda case: case.scope.eventing_functions().get_all_functions(),
    ],
    "`users()`": [
        lambda case: case.sdk.users().get_all_users(),
        lambda case: case.sdk.users().upsert_user(
            User(username="joe", password="word", roles=[Role("admin")])
        ),
        lambda case: case.sdk.users().get_roles(),
        lambda case: case.sdk.users().upsert_group(Group(name="readers", roles=[Role("admin")])),
    ],
}
