//! HELLO: the features of a connection.

use dcp_producer_proto::ServerVersion;
use dcp_wire::Feature;

use super::command::Command;
use super::failure::Failure;
use super::session::{Features, MapPush};

impl Features {
    /// The features in `wanted` that a server of this version offers, in the order of their codes, and
    /// the resulting settings.
    fn negotiate(wanted: &[Feature], version: ServerVersion) -> (Vec<Feature>, Self) {
        let mut features = Self::default();
        let mut granted: Vec<Feature> = Vec::with_capacity(wanted.len());
        let duplex = wanted.contains(&Feature::DUPLEX);
        if duplex && wanted.contains(&Feature::CLUSTER_MAP_CHANGE_NOTIFICATION_BRIEF) {
            features.map_push = MapPush::Brief;
        } else if duplex && wanted.contains(&Feature::CLUSTER_MAP_CHANGE_NOTIFICATION) {
            features.map_push = MapPush::Full;
        }
        for &feature in wanted {
            if granted.contains(&feature) || !is_in(feature, version) {
                continue;
            }
            let offered = match feature {
                Feature::MUTATION_SEQNO => set(&mut features.mutation_tokens),
                Feature::XATTR => set(&mut features.xattr),
                Feature::XERROR => set(&mut features.dcp.xerror),
                Feature::SNAPPY => set(&mut features.dcp.snappy),
                Feature::JSON => set(&mut features.dcp.json),
                Feature::COLLECTIONS => set(&mut features.dcp.collections),
                Feature::TRACING => set(&mut features.tracing),
                Feature::ALT_REQUEST_SUPPORT => set(&mut features.alt_requests),
                Feature::GET_CLUSTER_CONFIG_WITH_KNOWN_VERSION => {
                    set(&mut features.known_map_version)
                }
                Feature::DEDUPE_NOT_MY_VBUCKET_CLUSTER_MAP => set(&mut features.dedupe_maps),
                Feature::CLUSTER_MAP_CHANGE_NOTIFICATION
                | Feature::CLUSTER_MAP_CHANGE_NOTIFICATION_BRIEF => duplex,
                // Excludes DCP.
                Feature::UNORDERED_EXECUTION => set(&mut features.dcp.unordered_execution),
                Feature::TCP_NODELAY
                | Feature::SELECT_BUCKET
                | Feature::DUPLEX
                | Feature::PRESERVE_TTL
                | Feature::SYNC_REPLICATION
                | Feature::VATTR
                | Feature::SUBDOC_CREATE_AS_DELETED
                | Feature::SUBDOC_REPLICA_READ
                | Feature::SUBDOC_ALLOWS_ACCESS_ON_MULTIPLE_XATTR_KEYS
                | Feature::SUBDOC_BINARY_XATTR
                | Feature::DCP_SKIP_DELETES_IN_INITIAL_BACKFILL => true,
                // The others concern forms of sub-document operations that are not offered.
                _ => false,
            };
            if offered {
                granted.push(feature);
            }
        }
        granted.sort_unstable_by_key(|feature| feature.0);
        (granted, features)
    }
}

/// Whether servers of a version know a feature; those that all know are not listed.
const fn is_in(feature: Feature, version: ServerVersion) -> bool {
    match feature {
        Feature::ALT_REQUEST_SUPPORT | Feature::SYNC_REPLICATION => version.is_at_least(6, 5),
        Feature::SUBDOC_CREATE_AS_DELETED => version.is_at_least(6, 6),
        Feature::COLLECTIONS | Feature::PRESERVE_TTL | Feature::VATTR => version.is_at_least(7, 0),
        Feature::GET_CLUSTER_CONFIG_WITH_KNOWN_VERSION
        | Feature::DEDUPE_NOT_MY_VBUCKET_CLUSTER_MAP
        | Feature::SUBDOC_REPLICA_READ => version.is_at_least(7, 6),
        Feature::DCP_SKIP_DELETES_IN_INITIAL_BACKFILL => version.skips_deletions(),
        _ => true,
    }
}

fn set(flag: &mut bool) -> bool {
    *flag = true;
    true
}

impl Command<'_, '_> {
    pub(super) fn hello(&mut self) -> Result<(), Failure> {
        if !self.frame.extras.is_empty() {
            return Err(Failure::Invalid("the request must not have extras"));
        }
        let (codes, rest) = self.frame.value.as_chunks::<2>();
        if !rest.is_empty() {
            return Err(Failure::Invalid("features are two bytes each"));
        }
        let wanted: Vec<_> = codes.iter().map(|code| Feature(u16::from_be_bytes(*code))).collect();
        let push = wanted.contains(&Feature::CLUSTER_MAP_CHANGE_NOTIFICATION)
            || wanted.contains(&Feature::CLUSTER_MAP_CHANGE_NOTIFICATION_BRIEF);
        if push && !wanted.contains(&Feature::DUPLEX) {
            return Err(Failure::Invalid("cluster map notifications need duplex"));
        }
        let (granted, features) = Features::negotiate(&wanted, self.session.version);
        self.session.features = features;
        let value: Vec<u8> = granted.iter().flat_map(|feature| feature.0.to_be_bytes()).collect();
        self.succeed(self.success().with_value(&value))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn features_offered_are_granted_once_in_the_order_of_their_codes() {
        let wanted = [
            Feature::XERROR,
            Feature::SUBDOC_DOCUMENT_MACRO_SUPPORT,
            Feature(0x7777),
            Feature::JSON,
            Feature::XERROR,
            Feature::UNORDERED_EXECUTION,
        ];
        let (granted, features) = Features::negotiate(&wanted, ServerVersion::NEWEST);
        assert_eq!(granted, [Feature::XERROR, Feature::JSON, Feature::UNORDERED_EXECUTION]);
        assert!(features.dcp.xerror && features.dcp.json && !features.dcp.collections);
        assert!(features.dcp.unordered_execution, "DCP cannot be opened");
    }

    #[test]
    fn op_10_feature_of_first_loads_without_deletions_is_granted_where_the_flag_is_known() {
        const OLDER: ServerVersion = ServerVersion { major: 7, minor: 6, patch: 11 };
        let wanted = [Feature::DCP_SKIP_DELETES_IN_INITIAL_BACKFILL];
        assert_eq!(Features::negotiate(&wanted, ServerVersion::NEWEST).0, wanted);
        assert_eq!(Features::negotiate(&wanted, OLDER).0, []);
    }

    #[test]
    fn sv_03_features_that_a_version_does_not_know_are_not_granted() {
        let wanted =
            [Feature::XATTR, Feature::COLLECTIONS, Feature::GET_CLUSTER_CONFIG_WITH_KNOWN_VERSION];
        for (major, minor, known) in [(6, 0, 1), (6, 6, 1), (7, 0, 2), (7, 6, 3), (8, 0, 3)] {
            let version = ServerVersion { major, minor, patch: 0 };
            let (granted, features) = Features::negotiate(&wanted, version);
            assert_eq!(granted, wanted[..known], "{version:?}");
            assert_eq!(features.dcp.collections, known > 1, "{version:?}");
        }
    }

    #[test]
    fn map_notification_is_brief_if_a_client_wants_both() {
        let full = Feature::CLUSTER_MAP_CHANGE_NOTIFICATION;
        let brief = Feature::CLUSTER_MAP_CHANGE_NOTIFICATION_BRIEF;
        let push =
            |wanted: &[Feature]| Features::negotiate(wanted, ServerVersion::NEWEST).1.map_push;
        assert_eq!(push(&[full, Feature::DUPLEX]), MapPush::Full);
        assert_eq!(push(&[brief, full, Feature::DUPLEX]), MapPush::Brief);
        assert_eq!(push(&[Feature::DUPLEX]), MapPush::Off);
    }
}
