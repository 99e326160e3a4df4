"""Calls of the Couchbase SDK, each tried on the embedded cluster."""

from couchbase.kv_range_scan import PrefixScan, RangeScan, SamplingScan
from couchbase.management.analytics import S3ExternalAnalyticsLink
from couchbase.management.eventing import EventingFunction
from couchbase.management.search import SearchIndex
from couchbase.management.users import Group, Role, User
from couchbase.management.views import DesignDocument, DesignDocumentNamespace
from couchbase.search import MatchAllQuery, SearchRequest
from couchbase.vector_search import VectorQuery, VectorSearch

PRODUCTION = DesignDocumentNamespace.PRODUCTION


def everything():
    return SearchRequest.create(MatchAllQuery())


def vectors():
    return SearchRequest.create(VectorSearch.from_vector_query(VectorQuery("v", [1.0])))


def bucket(sdk):
    return sdk.bucket("default")


def scope(sdk):
    return bucket(sdk).default_scope()


def collection(sdk):
    return bucket(sdk).default_collection()


# What a cluster that has a data service only does not do, by the name the guide has for it.
ABSENT = {
    "`scan` of a range": lambda sdk: list(collection(sdk).scan(RangeScan())),
    "`scan` of a prefix": lambda sdk: list(collection(sdk).scan(PrefixScan("a"))),
    "`scan` of a sample": lambda sdk: list(collection(sdk).scan(SamplingScan(3))),
    "`Cluster.query`": lambda sdk: sdk.query("SELECT 1").execute(),
    "`Scope.query`": lambda sdk: scope(sdk).query("SELECT 1").execute(),
    "`Cluster.search`": lambda sdk: list(sdk.search("index", everything()).rows()),
    "`Cluster.search` for vectors": lambda sdk: list(sdk.search("index", vectors()).rows()),
    "`Scope.search`": lambda sdk: list(scope(sdk).search("index", everything()).rows()),
    "`Cluster.analytics_query`": lambda sdk: list(sdk.analytics_query("SELECT 1").rows()),
    "`Scope.analytics_query`": lambda sdk: list(scope(sdk).analytics_query("SELECT 1").rows()),
    "`view_query`": lambda sdk: list(bucket(sdk).view_query("design", "view").rows()),
    "`view_indexes`: reading": lambda sdk: (
        bucket(sdk).view_indexes().get_design_document("design", PRODUCTION)
    ),
    "`view_indexes`: writing": lambda sdk: (
        bucket(sdk)
        .view_indexes()
        .upsert_design_document(DesignDocument(name="design", views={}), PRODUCTION)
    ),
    "`Cluster.eventing_functions`: reading": lambda sdk: (
        sdk.eventing_functions().get_all_functions()
    ),
    "`Cluster.eventing_functions`: writing": lambda sdk: sdk.eventing_functions().upsert_function(
        EventingFunction("function", code="", version="7.1.0")
    ),
    "`Scope.eventing_functions`": lambda sdk: scope(sdk).eventing_functions().get_all_functions(),
    "`Cluster.query_indexes`: reading": lambda sdk: sdk.query_indexes().get_all_indexes("default"),
    "`Cluster.query_indexes`: writing": lambda sdk: sdk.query_indexes().create_primary_index(
        "default"
    ),
    "`Collection.query_indexes`": lambda sdk: collection(sdk).query_indexes().get_all_indexes(),
    "`Cluster.search_indexes`: reading": lambda sdk: sdk.search_indexes().get_all_indexes(),
    "`Cluster.search_indexes`: writing": lambda sdk: sdk.search_indexes().upsert_index(
        SearchIndex(name="index", source_name="default")
    ),
    "`Scope.search_indexes`": lambda sdk: scope(sdk).search_indexes().get_all_indexes(),
    "`analytics_indexes`: reading": lambda sdk: sdk.analytics_indexes().get_all_datasets(),
    "`analytics_indexes`: writing": lambda sdk: sdk.analytics_indexes().create_dataverse("verse"),
    "`analytics_indexes`: links": lambda sdk: sdk.analytics_indexes().create_link(
        S3ExternalAnalyticsLink("verse", "link", "id", region="eu", secret_access_key="key")
    ),
    "`users`: reading": lambda sdk: sdk.users().get_all_users(),
    "`users`: writing": lambda sdk: sdk.users().upsert_user(
        User(username="joe", password="word", roles=[Role("admin")])
    ),
    "`users`: roles": lambda sdk: sdk.users().get_roles(),
    "`users`: groups": lambda sdk: sdk.users().upsert_group(
        Group(name="readers", roles=[Role("admin")])
    ),
}
