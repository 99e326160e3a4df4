//! Options of producers and of document writes.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;
use std::time::Duration;

use bytes::Bytes;
use dcp_wire::{Cas, CollectionId, Datatype, RevSeqno, Seqno, Vbid, Vbuuid};

use crate::{Error, TlsOptions};

/// A user who may stream changes and read documents, with the role *Data DCP Reader*: no
/// statistics, no writes.
#[derive(Clone)]
pub struct User {
    /// Name clients authenticate with.
    pub username: String,
    /// Password clients authenticate with.
    pub password: String,
    /// Where the user has the role: scopes such as `inventory` and collections such as
    /// `inventory.hotels`, in every bucket. `None` for whole buckets; empty for nothing.
    pub reads: Option<Vec<String>>,
}

impl fmt::Debug for User {
    /// Leaves the password out.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("User")
            .field("username", &self.username)
            .field("reads", &self.reads)
            .finish_non_exhaustive()
    }
}

/// Options of an embedded cluster.
#[derive(Clone)]
#[non_exhaustive]
pub struct ProducerOptions {
    /// Number of nodes, each with its own port (1 to 64). Default 1.
    pub nodes: usize,
    /// Number of vBuckets, spread evenly over the nodes (1 to 1024). Default 64.
    pub vbuckets: u16,
    /// Number of replicas of each vBucket, each on another node (0 to 3); fewer if there are too
    /// few nodes. Other buckets may have another number. Default 0.
    pub replicas: u8,
    /// Name of the first bucket. Default `default`.
    pub bucket: String,
    /// Name clients authenticate with. Default `Administrator`.
    pub username: String,
    /// Password clients authenticate with. Default `password`.
    pub password: String,
    /// Additional users with the role *Data DCP Reader*. Default none.
    pub users: Vec<User>,
    /// Key of the JSON web tokens that clients may authenticate with over TLS, as those of Server 8.1
    /// may: they are signed with HS256, and their claim `sub` names the user. At least 32 bytes.
    /// Default `None`: tokens are not accepted.
    pub token_key: Option<Vec<u8>>,
    /// Address to listen on. One that other machines can reach, `0.0.0.0` for all, needs a
    /// password other than the default. Default 127.0.0.1.
    pub host: IpAddr,
    /// Port of the first node, the others following; 0, the default, lets the system choose.
    pub port: u16,
    /// Port of the first node's management (HTTP), the others following; 0, the default, lets the
    /// system choose.
    pub management_port: u16,
    /// TLS options; TLS has its own ports. Default `None`: no TLS.
    pub tls: Option<TlsOptions>,
    /// Port of the first node for KV over TLS, the others following; 0, the default, lets the
    /// system choose.
    pub tls_port: u16,
    /// Connections that a node serves at a time; further ones are closed immediately. Default 1024.
    pub max_connections: usize,
    /// Streams per DCP connection; further requests are refused. Default 65,536.
    pub max_streams: usize,
    /// Largest flow-control buffer that a DCP client may request, in bytes. Default 4 GiB, the most
    /// that clients can request.
    pub max_unacknowledged_bytes: u32,
    /// How long a client may take to authenticate before its connection is closed. Default 60 s.
    pub authentication_timeout: Duration,
    /// How long a connection may be idle in both directions before it is closed, unless it was
    /// opened for DCP. Default 5 min.
    pub idle_timeout: Duration,
    /// How long a client whose DCP connection has noops enabled may be silent. Default 6 min.
    pub dcp_idle_timeout: Duration,
    /// How long a client waits for a seqno to be persisted. Default 30 s.
    pub persistence_timeout: Duration,
    /// Memory quota of a bucket for documents and tombstones, in bytes, unless it is set when the
    /// bucket is created. Default 8 GiB.
    pub memory_quota_bytes: usize,
    /// Bytes of overwritten documents kept so that vBuckets can be rolled back. Default 256 MiB.
    pub history_bytes: usize,
    /// Whether clients may stream every version of a document (`change_streams`), as far as
    /// `history_bytes` goes. Default `false`.
    pub keeps_history: bool,
    /// Whether the first bucket is ephemeral: it has no disk, so a node loses its data when it stops.
    /// Default `false`.
    pub ephemeral: bool,
    /// Alternate name or address of the nodes for clients elsewhere, sent in the cluster map.
    /// Default none.
    pub alternate_host: Option<String>,
    /// Folder that keeps the buckets when the process ends; created if it does not exist. Only one
    /// process can use it at a time. Default none: everything is lost then.
    pub data: Option<PathBuf>,
    /// How long a change waits in memory before it is persisted. Default 50 ms.
    pub persist_delay: Duration,
    /// TCP congestion control of the connections, such as `reno` or `cubic`; it is an error if the
    /// system refuses it. By default `reno` if the system allows it, which is faster over loopback
    /// than algorithms with pacing, such as `bbr`.
    pub congestion_control: Option<String>,
    /// Whether values that clients send compressed stay compressed, as with the compression mode
    /// "passive"; otherwise they are decompressed ("off"). Default `false`.
    pub keeps_compressed: bool,
    /// Whether the nodes have no ports: connections are made with
    /// [`Producer::dial`](crate::Producer::dial) and use no system resources, so that a runtime
    /// with paused time runs the cluster in simulated time. Default `false`.
    pub in_memory: bool,
    /// Seed of random numbers: history branches, identities, nonces. With the same seed, two
    /// clusters whose clients do the same behave the same, and CAS values and expiries are based on
    /// the runtime's clock, which may be paused, from a fixed time on. For tests only: the seed
    /// determines the nonces. Default `None`: the system's randomness and clock.
    pub seed: Option<u64>,
}

impl Default for ProducerOptions {
    fn default() -> Self {
        Self {
            nodes: 1,
            vbuckets: 64,
            replicas: 0,
            bucket: "default".to_owned(),
            username: "Administrator".to_owned(),
            password: Self::DEFAULT_PASSWORD.to_owned(),
            users: Vec::new(),
            token_key: None,
            host: IpAddr::V4(Ipv4Addr::LOCALHOST),
            port: 0,
            management_port: 0,
            tls: None,
            tls_port: 0,
            max_connections: 1024,
            max_streams: 65_536,
            max_unacknowledged_bytes: u32::MAX,
            authentication_timeout: Duration::from_secs(60),
            idle_timeout: Duration::from_secs(300),
            dcp_idle_timeout: Duration::from_secs(360),
            persistence_timeout: Duration::from_secs(30),
            memory_quota_bytes: 8 << 30,
            history_bytes: 256 << 20,
            keeps_history: false,
            ephemeral: false,
            alternate_host: None,
            data: None,
            persist_delay: Duration::from_millis(50),
            congestion_control: None,
            keeps_compressed: false,
            in_memory: false,
            seed: None,
        }
    }
}

impl fmt::Debug for ProducerOptions {
    /// Leaves the password and the key out.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ProducerOptions")
            .field("nodes", &self.nodes)
            .field("vbuckets", &self.vbuckets)
            .field("replicas", &self.replicas)
            .field("bucket", &self.bucket)
            .field("username", &self.username)
            .field("host", &self.host)
            .field("port", &self.port)
            .field("tls", &self.tls)
            .finish_non_exhaustive()
    }
}

impl ProducerOptions {
    const DEFAULT_PASSWORD: &str = "password";
    /// Shortest key of tokens, in bytes (RFC 7518, section 3.2).
    const MIN_TOKEN_KEY_LEN: usize = 32;
    const MAX_NODES: usize = 64;
    const MAX_VBUCKETS: u16 = 1024;
    pub(crate) const MAX_REPLICAS: u8 = 3;
    /// What a bucket may be called.
    pub(crate) const BUCKET_NAME: &str = "must be 1 to 100 letters, digits, `_`, `-`, `.` or `%`";

    pub(crate) fn is_bucket_name(name: &str) -> bool {
        (1..=100).contains(&name.len())
            && name.bytes().all(|b| b.is_ascii_alphanumeric() || b"_-.%".contains(&b))
    }

    pub(crate) fn check(&self) -> Result<(), Error> {
        let invalid = |option, reason: String| Err(Error::InvalidOption { option, reason });
        let mut passwords = self.users.iter().map(|user| &user.password).chain([&self.password]);
        if !self.host.is_loopback() && passwords.any(|given| given == Self::DEFAULT_PASSWORD) {
            return Err(Error::DefaultPassword { host: self.host });
        }
        if !(1..=Self::MAX_NODES).contains(&self.nodes) {
            return invalid("nodes", format!("must be 1 to {}", Self::MAX_NODES));
        }
        if !(1..=Self::MAX_VBUCKETS).contains(&self.vbuckets) {
            return invalid("vbuckets", format!("must be 1 to {}", Self::MAX_VBUCKETS));
        }
        if self.replicas > Self::MAX_REPLICAS {
            return invalid("replicas", format!("must be 0 to {}", Self::MAX_REPLICAS));
        }
        if !Self::is_bucket_name(&self.bucket) {
            return invalid("bucket", Self::BUCKET_NAME.to_owned());
        }
        if self.username.is_empty() || self.username.contains('\0') {
            return invalid("username", "must not be empty or contain NUL".to_owned());
        }
        if self.password.is_empty() || self.password.contains('\0') {
            return invalid("password", "must not be empty or contain NUL".to_owned());
        }
        let mut names = vec![&self.username];
        for user in &self.users {
            for (what, text) in [("username", &user.username), ("password", &user.password)] {
                if text.is_empty() || text.contains('\0') {
                    return invalid("users", format!("a {what} must not be empty or contain NUL"));
                }
            }
            if names.contains(&&user.username) {
                return invalid("users", format!("'{}' appears twice", user.username));
            }
            names.push(&user.username);
        }
        if self.ephemeral && self.data.is_some() {
            return invalid("data", "an ephemeral bucket has no disk".to_owned());
        }
        if let Some(tls) = &self.tls {
            tls.check()?;
        }
        if let Some(key) = &self.token_key {
            if key.len() < Self::MIN_TOKEN_KEY_LEN {
                let least = Self::MIN_TOKEN_KEY_LEN;
                return invalid("token_key", format!("must have at least {least} bytes"));
            }
            if self.tls.is_none() {
                return invalid("token_key", "tokens are accepted over TLS only".to_owned());
            }
        }
        if self.seed.is_some() && !self.in_memory {
            return invalid("seed", "only a cluster without ports can be predictable".to_owned());
        }
        if self.in_memory && self.tls.is_some() {
            return invalid("in_memory", "a cluster without ports cannot use TLS".to_owned());
        }
        for (option, count) in
            [("max_connections", self.max_connections), ("max_streams", self.max_streams)]
        {
            if count == 0 {
                return invalid(option, "must be at least 1".to_owned());
            }
        }
        for (option, time) in [
            ("authentication_timeout", self.authentication_timeout),
            ("idle_timeout", self.idle_timeout),
            ("dcp_idle_timeout", self.dcp_idle_timeout),
        ] {
            if time.is_zero() {
                return invalid(option, "must be more than 0".to_owned());
            }
        }
        Ok(())
    }
}

/// How a document is written or removed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct WriteOptions {
    /// Collection of the document.
    pub collection_id: CollectionId,
    /// Version the document must have; 0 for any.
    pub cas: Cas,
    /// Flags set by the application.
    pub flags: u32,
    /// When the document expires: 0 never, up to 30 days in seconds from now, above in seconds
    /// since 1970.
    pub expiry: u32,
    /// Encoding of the value; `None` detects whether it is JSON.
    pub datatype: Option<Datatype>,
}

/// Location of a write in the history of its vBucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MutationToken {
    /// vBucket written to.
    pub vbid: Vbid,
    /// History branch of the write.
    pub vbuuid: Vbuuid,
    /// Position of the write.
    pub seqno: Seqno,
    /// New CAS of the document.
    pub cas: Cas,
}

/// A document as it is stored.
#[derive(Clone, PartialEq, Eq)]
pub struct Document {
    /// Value as stored; begins with the xattr section if the datatype says so.
    pub value: Bytes,
    /// Encoding of the value.
    pub datatype: Datatype,
    /// Version.
    pub cas: Cas,
    /// Position in its vBucket.
    pub seqno: Seqno,
    /// Revision seqno of the document.
    pub rev_seqno: RevSeqno,
    /// Flags set by the application.
    pub flags: u32,
    /// Seconds since 1970 at which it expires; 0 never.
    pub expiry: u32,
}

impl fmt::Debug for Document {
    /// Leaves the value out.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Document")
            .field("value_bytes", &self.value.len())
            .field("datatype", &self.datatype)
            .field("cas", &self.cas)
            .field("seqno", &self.seqno)
            .finish_non_exhaustive()
    }
}
