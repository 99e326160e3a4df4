//! Responses to everything but stream requests: set-up and queries about the bucket.

use std::net::SocketAddr;
use std::sync::{Arc, LazyLock};

use dcp_wire::message::{
    GetAllVbSeqnos, Hello, ObservedSeqno, Request, ResolveName, ResolvedName, Sasl,
    encode_features, encode_vb_seqnos,
};
use dcp_wire::sasl::{Mechanism, PlainMessage, SaslError, ScramCredentials, ScramServer};
use dcp_wire::{
    CollectionId, Datatype, Feature, Frame, ManifestUid, Opcode, ScopeId, Status, Vbid,
};
use serde_json::{Value, json};

use super::Shared;

/// The password of every user.
const PASSWORD: &str = "password";

/// Number of iterations that the data service uses.
const SCRAM_ITERATIONS: u32 = 4096;

/// Credentials of each SCRAM mechanism, cached because deriving them is slow.
static SCRAM: LazyLock<Vec<ScramCredentials>> = LazyLock::new(|| {
    let derive = |mechanism| {
        ScramCredentials::derive(mechanism, PASSWORD, b"scripted salt", SCRAM_ITERATIONS).ok()
    };
    Mechanism::PASSWORD.into_iter().filter_map(derive).collect()
});

/// Features that do not affect streams, granted whether recorded or not.
const HARMLESS: [Feature; 6] = [
    Feature::TCP_NODELAY,
    Feature::XERROR,
    Feature::SELECT_BUCKET,
    Feature::ALT_REQUEST_SUPPORT,
    Feature::GET_CLUSTER_CONFIG_WITH_KNOWN_VERSION,
    Feature::DUPLEX,
];

pub(super) struct Answers {
    addr: SocketAddr,
    recorded: u32,
    shared: Arc<Shared>,
    granted: Vec<Feature>,
    scram: Option<ScramServer>,
    has_bucket: bool,
}

impl Answers {
    pub(super) const fn new(addr: SocketAddr, recorded: u32, shared: Arc<Shared>) -> Self {
        let granted = Vec::new();
        Self { addr, recorded, shared, granted, scram: None, has_bucket: false }
    }

    /// The response to a request, `None` if it has none.
    pub(super) fn answer(&mut self, frame: &Frame<'_>, request: &Request<'_>) -> Option<Vec<u8>> {
        let opcode = frame.header.opcode;
        let (status, value) = match request {
            Request::Hello(hello) => (Status::SUCCESS, self.hello(hello)),
            Request::Sasl(sasl) => self.sasl(opcode, sasl),
            Request::SelectBucket(_) => {
                self.has_bucket = true;
                (Status::SUCCESS, Vec::new())
            }
            Request::GetErrorMap(_) => {
                let map = json!({"version": 2, "revision": 1, "errors": {}});
                return Some(json_response(frame, &map));
            }
            Request::GetClusterConfig(_) => return Some(json_response(frame, &self.config())),
            Request::Open(..) => self.open(),
            Request::GetAllVbSeqnos(request) => (Status::SUCCESS, self.seqnos(*request)),
            Request::ObserveSeqno(request) => {
                let (vbid, mut value) = (frame.header.vbid(), Vec::new());
                let high = self.shared.script().high_seqno(vbid);
                let (vbuuid, persisted_seqno, current_seqno) = (request.vbuuid, high, high);
                let failover = None;
                ObservedSeqno { vbid, vbuuid, persisted_seqno, current_seqno, failover }
                    .encode(&mut value);
                (Status::SUCCESS, value)
            }
            Request::ResolveName(name) => return Some(self.resolve(frame, *name)),
            Request::Plain => match opcode {
                Opcode::SASL_LIST_MECHS => {
                    let names = Mechanism::PASSWORD.map(Mechanism::name).join(" ");
                    (Status::SUCCESS, names.into_bytes())
                }
                Opcode::GET_COLLECTIONS_MANIFEST => {
                    return Some(json_response(frame, &self.shared.script().manifest));
                }
                Opcode::DCP_GET_FAILOVER_LOG | Opcode::GET_FAILOVER_LOG => {
                    (Status::SUCCESS, self.shared.script().failover_log(frame.header.vbid()))
                }
                Opcode::NOOP => (Status::SUCCESS, Vec::new()),
                _ => (Status::NOT_SUPPORTED, Vec::new()),
            },
            Request::SeqnoAck(_) => return None,
            _ => (Status::NOT_SUPPORTED, Vec::new()),
        };
        Some(encode(&response(frame, status).with_value(&value)))
    }

    /// Grants the features that the recorded connection had and the client requests.
    fn hello(&mut self, hello: &Hello<'_>) -> Vec<u8> {
        let script = self.shared.script();
        let (recorded, _) = script.features(self.recorded).as_chunks::<2>();
        let recorded: Vec<_> = recorded.iter().map(|b| Feature(u16::from_be_bytes(*b))).collect();
        let granted = |feature: &Feature| recorded.contains(feature) || HARMLESS.contains(feature);
        self.granted = hello.features.iter().filter(granted).collect();
        encode_features(self.granted.iter().copied())
    }

    /// A client that did not negotiate collections cannot decode keys with collection ids.
    fn open(&self) -> (Status, Vec<u8>) {
        let mut script = self.shared.script();
        let (recorded, _) = script.features(self.recorded).as_chunks::<2>();
        let collections = Feature::COLLECTIONS.0.to_be_bytes();
        if recorded.contains(&collections) && !self.granted.contains(&Feature::COLLECTIONS) {
            let problem = "the recording has collections, the client did not ask for them";
            script.problems.push(problem.to_owned());
            return (Status::EINVAL, Vec::new());
        }
        (Status::SUCCESS, Vec::new())
    }

    fn sasl(&mut self, opcode: Opcode, sasl: &Sasl<'_>) -> (Status, Vec<u8>) {
        let refused = (Status::AUTH_ERROR, Vec::new());
        let Some(mechanism) = Mechanism::from_name(sasl.mechanism) else {
            return refused;
        };
        if mechanism == Mechanism::Plain {
            let known = PlainMessage::decode(sasl.message)
                .is_ok_and(|message| message.matches(message.username, PASSWORD));
            return if known { (Status::SUCCESS, Vec::new()) } else { refused };
        }
        if opcode == Opcode::SASL_STEP {
            let verdict = self.scram.take().map(|server| server.verify(sasl.message));
            return verdict.and_then(Result::ok).map_or(refused, |last| (Status::SUCCESS, last));
        }
        let challenge = ScramServer::read(sasl.message).and_then(|mut server| {
            let known = SCRAM.iter().find(|known| known.mechanism() == mechanism);
            let credentials = known.ok_or(SaslError::NoMechanism)?.clone();
            let challenge = server.challenge(credentials, "scripted-server-nonce")?;
            self.scram = Some(server);
            Ok(challenge)
        });
        challenge.map_or(refused, |message| (Status::AUTH_CONTINUE, message))
    }

    /// A cluster map with only this node.
    pub(super) fn config(&self) -> Value {
        let port = self.addr.port();
        let host = self.addr.ip().to_string();
        let node =
            json!({"services": {"kv": port, "mgmt": 8091}, "hostname": host, "thisNode": true});
        let revision = self.shared.script().revision;
        if !self.has_bucket {
            return json!({"rev": revision, "revEpoch": 1, "nodesExt": [node]});
        }
        let vbuckets = self.vbuckets();
        json!({
            "rev": revision,
            "revEpoch": 1,
            "name": "default",
            "uuid": "5c210000000000000000000000000001",
            "bucketType": "membase",
            "nodeLocator": "vbucket",
            "bucketCapabilities": ["collections", "dcp", "cccp", "nodesExt", "xattr", "durableWrite"],
            "collectionsManifestUid": self.shared.script().manifest.get("uid"),
            "nodesExt": [node],
            "vBucketServerMap": {
                "hashAlgorithm": "CRC",
                "numReplicas": 0,
                "serverList": [format!("{host}:{port}")],
                "vBucketMap": vec![[0]; usize::from(vbuckets)],
            },
        })
    }

    /// Number of vBuckets: a power of two that covers the recorded ones.
    fn vbuckets(&self) -> u16 {
        let vbids = self.shared.script().vbids();
        let highest = vbids.last().copied().unwrap_or_default();
        highest.0.saturating_add(1).checked_next_power_of_two().unwrap_or(u16::MAX)
    }

    fn seqnos(&self, request: GetAllVbSeqnos) -> Vec<u8> {
        let mut value = Vec::new();
        let wanted = request.state.flatten();
        if wanted.is_none_or(|state| state == dcp_wire::message::VbucketState::ACTIVE) {
            let vbids = (0..self.vbuckets()).map(Vbid);
            let script = self.shared.script();
            encode_vb_seqnos(vbids.map(|vbid| (vbid, script.high_seqno(vbid))), &mut value);
        }
        value
    }

    fn resolve(&self, frame: &Frame<'_>, name: ResolveName<'_>) -> Vec<u8> {
        let script = self.shared.script();
        let path = String::from_utf8_lossy(name.path);
        let manifest_uid = ManifestUid(hex_field(&script.manifest, "uid").unwrap_or_default());
        let (scope, collection) = path.split_once('.').unwrap_or((&path, ""));
        let found = named(&script.manifest, "scopes", scope);
        if frame.header.opcode == Opcode::GET_SCOPE_ID {
            let id = found.and_then(|scope| hex_field(scope, "uid")).map(low_u32);
            let extras = id.map(|id| ResolvedName::scope(manifest_uid, ScopeId(id)).encode());
            return resolved(frame, extras, Status::UNKNOWN_SCOPE);
        }
        let found = found.and_then(|scope| named(scope, "collections", collection));
        let id = found.and_then(|collection| hex_field(collection, "uid")).map(low_u32);
        let extras = id.map(|id| ResolvedName::collection(manifest_uid, CollectionId(id)).encode());
        resolved(frame, extras, Status::UNKNOWN_COLLECTION)
    }
}

/// The list item with this name; an empty name means the default one.
fn named<'a>(value: &'a Value, list: &str, name: &str) -> Option<&'a Value> {
    let name = if name.is_empty() { "_default" } else { name };
    let mut members = value.get(list)?.as_array()?.iter();
    members.find(|member| member.get("name").and_then(Value::as_str) == Some(name))
}

fn hex_field(value: &Value, name: &str) -> Option<u64> {
    u64::from_str_radix(value.get(name)?.as_str()?, 16).ok()
}

fn low_u32(id: u64) -> u32 {
    u32::try_from(id).unwrap_or(u32::MAX)
}

fn resolved(frame: &Frame<'_>, extras: Option<[u8; 12]>, unknown: Status) -> Vec<u8> {
    match extras {
        Some(extras) => encode(&response(frame, Status::SUCCESS).with_extras(&extras)),
        None => encode(&response(frame, unknown)),
    }
}

fn json_response(frame: &Frame<'_>, value: &Value) -> Vec<u8> {
    let text = value.to_string();
    encode(
        &response(frame, Status::SUCCESS).with_datatype(Datatype::JSON).with_value(text.as_bytes()),
    )
}

const fn response(request: &Frame<'_>, status: Status) -> Frame<'static> {
    Frame::response(request.header.opcode, status).with_opaque(request.header.opaque)
}

/// Encodes a packet whose parts are known to fit.
pub(super) fn encode(frame: &Frame<'_>) -> Vec<u8> {
    let mut bytes = Vec::new();
    frame.encode(&mut bytes).expect("a scripted packet fits its length fields");
    bytes
}
