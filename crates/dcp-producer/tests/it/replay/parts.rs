//! Versions, error maps and cluster maps, compared part by part.

use serde_json::Value;

use super::ignored::Ignored;
use super::twins::Twins;

/// The only release the embedded cluster calls itself.
const OWN_MAJOR: &str = "8";

/// Capabilities of a bucket that clients of DCP look at.
const CAPABILITIES: [&str; 5] = ["collections", "dcp", "xattr", "nodesExt", "cccp"];

fn read(bytes: &[u8]) -> Value {
    serde_json::from_slice(bytes).unwrap_or_default()
}

/// Compares versions: `8.0.2-0000` has three numbers and a build.
pub(super) fn versions_differ(theirs: &[u8], mine: &[u8], twins: &mut Twins) -> Option<String> {
    let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
    let (theirs, mine) = (text(theirs), text(mine));
    let release = |version: &str| {
        let (release, build) = version.split_once('-').unwrap_or((version, ""));
        (release.to_owned(), build.to_owned())
    };
    let ((recorded, recorded_build), (own, own_build)) = (release(&theirs), release(&mine));
    let is_release = |text: &str| {
        let numbers: Vec<_> = text.split('.').map(str::parse::<u16>).collect();
        numbers.len() == 3 && numbers.iter().all(Result::is_ok)
    };
    let is_older = recorded.split('.').next() != Some(OWN_MAJOR);
    let same = if is_older { is_release(&recorded) && is_release(&own) } else { recorded == own };
    twins.ignore(Ignored::VersionBuild, recorded_build != own_build);
    twins.ignore(Ignored::VersionNumber, recorded != own && same);
    (!same).then(|| format!("version {theirs} is {mine}"))
}

/// Compares error maps: version, and of each status that the embedded cluster knows its name and
/// attributes.
pub(super) fn error_maps_differ(theirs: &[u8], mine: &[u8], twins: &mut Twins) -> Option<String> {
    let (mut recorded, mut own) = (read(theirs), read(mine));
    twins.ignore(Ignored::ErrorWords, recorded != own);
    for map in [&mut recorded, &mut own] {
        for (_, error) in map["errors"].as_object_mut()? {
            error["desc"] = error["desc"].is_string().into();
        }
    }
    if recorded["version"] != own["version"] {
        return Some(format!("error map: version {} is {}", recorded["version"], own["version"]));
    }
    let (recorded, own) = (recorded["errors"].as_object()?, own["errors"].as_object()?);
    twins.ignore(Ignored::ErrorCodes, recorded.keys().any(|code| !own.contains_key(code)));
    let text = |error: Option<&Value>| error.map_or("nothing".to_owned(), Value::to_string);
    let differs: Vec<String> = own
        .iter()
        .filter(|(code, error)| recorded.get(*code) != Some(error))
        .map(|(code, error)| format!("{code} {} is {error}", text(recorded.get(code))))
        .collect();
    (!differs.is_empty()).then(|| format!("error map: {}", differs.join(", ")))
}

pub(super) fn is_map(value: &[u8]) -> bool {
    read(value)["nodesExt"].is_array()
}

/// Compares what of a cluster map is not the cluster's own affair: which bucket it is of and how it
/// is divided, that the same revision is the same again, and that what it names is there.
pub(super) fn maps_differ(theirs: &[u8], mine: &[u8], twins: &mut Twins) -> Option<String> {
    let (recorded, own) = (read(theirs), read(mine));
    let revision = |map: &Value| map["rev"].as_u64().unwrap_or_default();
    let (theirs, mine) = (revision(&recorded), revision(&own));
    twins.ignore(Ignored::MapRevision, theirs != mine);
    if !twins.revisions.match_up(theirs, mine) {
        return Some("map revisions pair up wrongly".to_owned());
    }
    let fields = [
        "/name",
        "/nodeLocator",
        "/revEpoch",
        "/clusterCapabilitiesVer",
        "/clusterCapabilities",
        "/vBucketServerMap/hashAlgorithm",
        "/vBucketServerMap/numReplicas",
    ];
    for field in fields {
        let (theirs, mine) = (recorded.pointer(field), own.pointer(field));
        if theirs.is_some() && theirs != mine {
            return Some(format!("map: {field} {theirs:?} is {mine:?}"));
        }
    }
    let is_of_bucket = |map: &Value| map["vBucketServerMap"].is_object();
    if is_of_bucket(&recorded) != is_of_bucket(&own) {
        return Some("one map is of a bucket, the other of none".to_owned());
    }
    let has = |map: &Value, what: &str| {
        map["bucketCapabilities"].as_array().is_some_and(|all| all.contains(&what.into()))
    };
    let lacks = CAPABILITIES.into_iter().find(|what| has(&recorded, what) && !has(&own, what));
    if let Some(what) = lacks {
        return Some(format!("map: the capability {what} is missing"));
    }
    let field = "bucketCapabilities";
    twins.ignore(Ignored::MapCapabilities, recorded[field] != own[field]);
    for field in ["uuid", "nodesExt", "vBucketServerMap"] {
        twins.ignore(Ignored::MapTopology, recorded[field] != own[field]);
    }
    [("recorded", &recorded), ("own", &own)].into_iter().find_map(|(whose, map)| {
        contradiction(map).map(|fault| format!("the {whose} map contradicts itself: {fault}"))
    })
}

/// What is wrong with a map by itself.
fn contradiction(map: &Value) -> Option<&'static str> {
    let nodes = map["nodesExt"].as_array()?;
    let is_whole = |node: &Value| {
        let services = &node["services"];
        services["kv"].is_u64() && services["mgmt"].is_u64() && node["hostname"].is_string()
    };
    if !nodes.iter().all(is_whole) {
        return Some("a node has no address");
    }
    if nodes.iter().filter(|node| node["thisNode"] == true).count() > 1 {
        return Some("two nodes tell it");
    }
    let vbuckets = &map["vBucketServerMap"];
    let copies = usize::try_from(vbuckets["numReplicas"].as_u64()?).ok()? + 1;
    let servers = i64::try_from(vbuckets["serverList"].as_array()?.len()).ok()?;
    let is_placed = |chain: &Value| {
        let chain = chain.as_array().map_or(&[][..], Vec::as_slice);
        let is_node = |at: &Value| at.as_i64().is_some_and(|at| (-1..servers).contains(&at));
        chain.len() == copies && chain.iter().all(is_node)
    };
    let all = vbuckets["vBucketMap"].as_array()?;
    (!all.len().is_power_of_two() || !all.iter().all(is_placed)).then_some("a copy is nowhere")
}
