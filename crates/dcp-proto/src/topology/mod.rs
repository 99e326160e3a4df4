//! Cluster maps, collection manifests and connection strings.
