//! What the comparison of a replay leaves out. `normalised.json` lists every kind with the reason;
//! a kind that ignores nothing any more has to go, and none comes in without being listed.

use std::collections::{BTreeMap, BTreeSet};

use serde::Deserialize;

use super::Found;
use super::markers::{Field, Source};

/// A kind of difference that is not told.
#[derive(Clone, Copy, Debug, Deserialize, PartialEq, Eq, PartialOrd, Ord)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Ignored {
    /// Versions of documents, which pair up.
    Cas,
    /// Names of branches, which pair up.
    Vbuuid,
    /// Revisions of cluster maps, which pair up.
    MapRevision,
    /// Addresses, sizes and the bucket's own number in a cluster map.
    MapTopology,
    /// What a bucket can do and no client of DCP asks for.
    MapCapabilities,
    /// When documents expire, if they do.
    Expiry,
    /// When tombstones were made, if they have a time.
    TombstoneTime,
    /// How a value was compressed; not in the project's recordings, where even that is the same.
    CompressedBytes,
    /// How long an answer took.
    Duration,
    /// Opaques of what a server sends by itself.
    OwnOpaque,
    /// Nonces, salts and proofs of a login.
    Login,
    /// What follows the three numbers of a version.
    VersionBuild,
    /// The three numbers, where an older server is played.
    VersionNumber,
    /// What the error map says of statuses in words.
    ErrorWords,
    /// Statuses of commands that are not offered, and the error map's own revision.
    ErrorCodes,
    /// What an error says in words, and its reference.
    ErrorContext,
    /// The request by which a node is told its map.
    SetClusterConfig,
    /// The map of a node that has none yet.
    NodeWithoutMap,
    /// Which of several streams is served next.
    Turns,
    /// The rest of a snapshot whose client left.
    RestOfSnapshot,
    /// Which changes of a burst were there when a snapshot was made, if a stream was open.
    MomentOfWrite,
    /// Where branches begin that line 1 does not name.
    Branches,
}

/// The list.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Normalised {
    ignored: Vec<Entry>,
    /// What the fields of snapshot markers are judged by: how many follow from what.
    marker_fields: BTreeMap<Field, BTreeMap<Source, usize>>,
    /// Fields of snapshot markers that are not judged, since they follow from themselves.
    not_judged: Vec<NotJudged>,
    /// Recordings that do not say what was written: that is taken from the streams they judge.
    without_operations: BTreeSet<String>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    what: Ignored,
    because: String,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct NotJudged {
    field: Field,
    scenarios: BTreeSet<String>,
    because: String,
}

impl Normalised {
    pub(super) fn read() -> Self {
        serde_json::from_str(include_str!("normalised.json")).unwrap()
    }

    /// What is not as the list says.
    pub(super) fn check(&self, found: &Found) -> Vec<String> {
        let listed: BTreeSet<Ignored> = self.ignored.iter().map(|entry| entry.what).collect();
        let unlisted = found.ignored.difference(&listed);
        let mut wrong: Vec<String> =
            unlisted.map(|what| format!("{what:?} is ignored, but not listed")).collect();
        let idle = listed.difference(&found.ignored);
        wrong.extend(idle.map(|what| format!("{what:?} ignores nothing: take it out")));
        let unreasoned = self.ignored.iter().filter(|entry| entry.because.len() < 20);
        wrong.extend(unreasoned.map(|entry| format!("{:?} has no reason", entry.what)));
        wrong.extend(self.check_markers(found));
        if self.without_operations != found.without_operations {
            wrong.push(format!(
                "without operations are {:?}, listed are {:?}",
                found.without_operations, self.without_operations
            ));
        }
        wrong
    }

    /// Fields that are judged by more than they were, or no longer are, have to be listed as they are.
    fn check_markers(&self, found: &Found) -> Vec<String> {
        let mut wrong = Vec::new();
        if self.marker_fields != found.marker_fields {
            let (found, listed) = (&found.marker_fields, &self.marker_fields);
            wrong.push(format!("fields of markers follow from {found:?}, listed are {listed:?}"));
        }
        let mut listed: BTreeMap<Field, BTreeSet<String>> = BTreeMap::new();
        for entry in &self.not_judged {
            listed.entry(entry.field).or_default().extend(entry.scenarios.clone());
            if entry.because.len() < 20 {
                wrong.push(format!("{:?} is not judged without a reason", entry.field));
            }
        }
        if listed != found.not_judged {
            let found = &found.not_judged;
            wrong.push(format!("{found:?} follow from themselves, listed are {listed:?}"));
        }
        wrong
    }
}
