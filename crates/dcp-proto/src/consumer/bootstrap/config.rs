//! The configuration of a bootstrap, and its outcome.

use core::fmt;

use dcp_wire::message::{Control, OpenFlags};
use dcp_wire::sasl::{Mechanism, SaltedPassword, SaslError};
use dcp_wire::{DecodeError, Feature, Opcode, Status};
use thiserror::Error;
use zeroize::Zeroizing;

use crate::consumer::Token;
use crate::topology::{
    BucketConfig, GlobalConfig, InvalidConfig, InvalidManifest, Manifest, Revision,
};

/// How the client authenticates.
#[derive(Clone)]
#[non_exhaustive]
pub enum Auth {
    /// With a client certificate, presented during the TLS handshake; SASL is skipped.
    Certificate,
    /// A user name and password.
    Password {
        /// User name.
        username: String,
        /// Password; erased when dropped.
        password: Zeroizing<String>,
        /// Random printable ASCII without a comma, 24 characters or more, never used twice.
        nonce: String,
        /// Allowed mechanisms in order of preference. PLAIN, which sends the password itself,
        /// belongs only on connections to verified servers.
        mechanisms: Vec<Mechanism>,
    },
    /// A token, which names the user; belongs only on connections to verified servers.
    Token(Token),
}

impl fmt::Debug for Auth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Certificate => f.write_str("Certificate"),
            Self::Token(token) => token.fmt(f),
            Self::Password { username, mechanisms, .. } => f
                .debug_struct("Password")
                .field("username", username)
                .field("mechanisms", mechanisms)
                .finish_non_exhaustive(),
        }
    }
}

/// One DCP_CONTROL to send after DCP_OPEN.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ControlSetting {
    /// Name of the setting; see the constants of [`Control`].
    pub key: &'static str,
    /// Its value.
    pub value: String,
    /// Whether the bootstrap fails if the server refuses it.
    pub required: bool,
    /// Feature that the server needs to accept it; without that feature it is not sent.
    pub needs: Option<Feature>,
}

impl ControlSetting {
    /// A setting that the connection requires.
    #[must_use]
    pub fn required(key: &'static str, value: impl fmt::Display) -> Self {
        Self { key, value: value.to_string(), required: true, needs: None }
    }

    /// A setting that servers may refuse, as old ones do.
    #[must_use]
    pub fn optional(key: &'static str, value: impl fmt::Display) -> Self {
        Self { key, value: value.to_string(), required: false, needs: None }
    }

    /// The same, sent only where the server granted `feature`.
    #[must_use]
    pub const fn needing(mut self, feature: Feature) -> Self {
        self.needs = Some(feature);
        self
    }
}

/// How to turn the connection into a DCP connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DcpOpen {
    /// Name of the connection, at most 200 bytes; the server ends an older one of the same name.
    pub name: String,
    /// Flags to send; [`OpenFlags::PRODUCER`] is added, and flags that the server does not know are
    /// left out.
    pub flags: OpenFlags,
    /// Settings, in the order they are sent.
    pub controls: Vec<ControlSetting>,
    /// Features that the flags need. They are asked for besides those of the bootstrap, which fails
    /// without them.
    pub required_features: Vec<Feature>,
}

impl DcpOpen {
    /// A producer connection with the settings every consumer wants: noops each
    /// `noop_interval_secs`, and a flow-control buffer of `buffer_size` bytes.
    #[must_use]
    pub fn new(
        name: impl Into<String>,
        flags: OpenFlags,
        buffer_size: u32,
        noop_interval_secs: u32,
    ) -> Self {
        let controls = vec![
            // Streams with xattrs or collections are refused until noops are on.
            ControlSetting::required(Control::ENABLE_NOOP, true),
            ControlSetting::required(Control::SET_NOOP_INTERVAL, noop_interval_secs),
            ControlSetting::required(Control::CONNECTION_BUFFER_SIZE, buffer_size),
            ControlSetting::optional(Control::ENABLE_EXPIRY_OPCODE, true),
            ControlSetting::optional(Control::SEND_STREAM_END_ON_CLIENT_CLOSE_STREAM, true),
            ControlSetting::optional(Control::FLATBUFFERS_SYSTEM_EVENTS, true)
                .needing(Feature::COLLECTIONS),
            ControlSetting::optional(Control::MAX_MARKER_VERSION, "2.2")
                .needing(Feature::COLLECTIONS),
        ];
        Self { name: name.into(), flags, controls, required_features: Vec::new() }
    }

    /// The same with one more setting.
    #[must_use]
    pub fn with(mut self, setting: ControlSetting) -> Self {
        self.controls.push(setting);
        self
    }
}

/// Configuration of a bootstrap.
#[derive(Clone, Debug)]
pub struct BootstrapConfig {
    /// Name and version of the program, shown in the server's logs.
    pub agent: String,
    /// Identity of the connection, shown in the server's logs; at most 33 bytes are sent.
    pub connection_id: String,
    /// How the client authenticates.
    pub auth: Auth,
    /// The password of a client's connections, salted.
    pub salted: SaltedPassword,
    /// Bucket to select; without one the cluster's configuration is fetched.
    pub bucket: Option<String>,
    /// Host of the connection, used for nodes that a configuration does not name.
    pub connected_host: String,
    /// Features to ask for.
    pub features: Vec<Feature>,
    /// Features without which the bootstrap fails.
    pub required_features: Vec<Feature>,
    /// Whether to fetch the collections manifest, where the server has collections.
    pub manifest: bool,
    /// How to open DCP; `None` leaves an ordinary connection.
    pub dcp: Option<DcpOpen>,
}

impl BootstrapConfig {
    /// The features a consumer asks for by default.
    pub const FEATURES: [Feature; 10] = [
        Feature::XATTR,
        Feature::XERROR,
        Feature::SELECT_BUCKET,
        Feature::SNAPPY,
        Feature::JSON,
        Feature::DUPLEX,
        Feature::CLUSTER_MAP_CHANGE_NOTIFICATION,
        Feature::ALT_REQUEST_SUPPORT,
        Feature::COLLECTIONS,
        // Introduced together with the user xattrs of deletions, which have no feature of their
        // own.
        Feature::SUBDOC_CREATE_AS_DELETED,
    ];

    /// A bootstrap that selects `bucket`, if any, and fetches the configuration.
    #[must_use]
    pub fn new(auth: Auth, bucket: Option<String>, connected_host: impl Into<String>) -> Self {
        Self {
            agent: concat!("dcp_rs:", env!("CARGO_PKG_VERSION")).to_owned(),
            connection_id: String::new(),
            auth,
            salted: SaltedPassword::default(),
            bucket,
            connected_host: connected_host.into(),
            features: Self::FEATURES.to_vec(),
            // Without it the server hides most errors behind a closed connection.
            required_features: vec![Feature::XERROR],
            manifest: true,
            dcp: None,
        }
    }
}

/// The configuration that a connection received.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ClusterConfig {
    /// Of the bucket selected.
    Bucket(BucketConfig),
    /// Of the cluster, no bucket being selected.
    Global(GlobalConfig),
}

impl ClusterConfig {
    /// Version of the configuration.
    #[must_use]
    pub const fn revision(&self) -> Revision {
        match self {
            Self::Bucket(config) => config.revision(),
            Self::Global(config) => config.revision(),
        }
    }

    /// The bucket's configuration, if a bucket is selected.
    #[must_use]
    pub const fn bucket(&self) -> Option<&BucketConfig> {
        match self {
            Self::Bucket(config) => Some(config),
            Self::Global(_) => None,
        }
    }
}

/// The outcome of a bootstrap.
#[derive(Clone, Debug)]
pub struct BootstrapOutcome {
    /// Features that were requested and granted, ascending.
    pub features: Vec<Feature>,
    /// The configuration.
    pub config: ClusterConfig,
    /// The collections manifest; `None` if it was not requested or the server has no collections.
    pub manifest: Option<Manifest>,
    /// Keys of the controls that the server accepted.
    pub controls: Vec<&'static str>,
}

impl BootstrapOutcome {
    /// Whether the server granted a feature.
    #[must_use]
    pub fn has_feature(&self, feature: Feature) -> bool {
        self.features.contains(&feature)
    }

    /// Whether the server accepted a control.
    #[must_use]
    pub fn has_control(&self, key: &str) -> bool {
        self.controls.contains(&key)
    }
}

/// What a server adds to a refusal: a sentence, and a reference into its own log (server page "BinaryProtocol").
///
/// Displayed with a colon in front, or not at all if the server added nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ErrorContext(String);

impl ErrorContext {
    /// Longest text kept, in characters.
    const MAX_LEN: usize = 300;

    /// Takes the text out of a response that is not a success.
    #[must_use]
    pub fn of(value: &[u8]) -> Self {
        #[derive(serde::Deserialize)]
        struct Body {
            error: Text,
        }
        #[derive(serde::Deserialize)]
        struct Text {
            context: Option<String>,
            #[serde(rename = "ref")]
            reference: Option<String>,
        }

        let Ok(Body { error }) = serde_json::from_slice(value) else {
            return Self::default();
        };
        let reference = error.reference.map(|reference| format!("reference {reference}"));
        let parts: Vec<String> = error.context.into_iter().chain(reference).collect();
        // The peer's text ends up in terminals and logs.
        let plain = parts.join(", ").replace(char::is_control, " ");
        Self(plain.chars().take(Self::MAX_LEN).collect())
    }
}

impl fmt::Display for ErrorContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return Ok(());
        }
        write!(f, ": {}", self.0)
    }
}

/// Why a connection could not be set up. Holds names of buckets and settings, never a secret.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum BootstrapError {
    /// The server refuses the user name or password.
    #[error("authentication failed: check user name and password{context}")]
    AuthenticationFailed {
        /// The server's explanation.
        context: ErrorContext,
    },
    /// The server refuses the token.
    #[error("the server refuses the token ({status}{context})")]
    TokenRefused {
        /// The server's status.
        status: Status,
        /// The server's explanation.
        context: ErrorContext,
    },
    /// The server has accepted the token, but says that it has expired or is not valid yet.
    #[error("the server says that the token has expired or is not valid yet")]
    TokenStale,
    /// The server does not accept tokens.
    #[error(
        "the server does not accept tokens: it must be Couchbase Server 8.1 or newer with JWT \
         authentication enabled"
    )]
    NoTokens,
    /// The SASL exchange failed on this side: no usable mechanism, a wrong server signature.
    #[error(transparent)]
    Sasl(#[from] SaslError),
    /// The bucket does not exist, or the user may not see it.
    #[error("bucket '{bucket}' not found: check its name and that the user may access it")]
    BucketNotFound {
        /// Requested name.
        bucket: String,
    },
    /// The user may not use the bucket.
    #[error("no access to bucket '{bucket}': check that it exists and the user's roles")]
    BucketAccess {
        /// Requested name.
        bucket: String,
    },
    /// The user may not open DCP connections.
    #[error("the user may not open DCP connections")]
    DcpAccess,
    /// The server does not grant a required feature.
    #[error("the server does not support {0:?}, which is required")]
    FeatureMissing(Feature),
    /// The server refuses a required setting, or any setting for now.
    #[error("the server refuses the setting {key}={value} ({status}{context})")]
    ControlRefused {
        /// Name of the setting.
        key: &'static str,
        /// Requested value.
        value: String,
        /// The server's status.
        status: Status,
        /// The server's explanation.
        context: ErrorContext,
    },
    /// The server has no configuration yet, for example while it starts or creates the bucket.
    #[error("the server has no cluster configuration yet ({status}): try again later")]
    NoConfig {
        /// The server's status.
        status: Status,
    },
    /// The configuration cannot be used.
    #[error(transparent)]
    Config(#[from] InvalidConfig),
    /// The collections manifest cannot be used.
    #[error(transparent)]
    Manifest(#[from] InvalidManifest),
    /// A step failed with a status that no other variant covers.
    #[error("the server answered {opcode} with {status}{context}")]
    Status {
        /// Step that failed.
        opcode: Opcode,
        /// The server's status.
        status: Status,
        /// The server's explanation.
        context: ErrorContext,
    },
    /// A response has the wrong form.
    #[error("malformed response to {opcode}")]
    Malformed {
        /// Step that was answered.
        opcode: Opcode,
        /// What is wrong.
        source: DecodeError,
    },
    /// The bytes are not packets: the peer is not a data service.
    #[error(transparent)]
    Decode(#[from] DecodeError),
    /// A packet that is not expected during set-up.
    #[error("the server sent an unexpected packet ({opcode}) during connection set-up")]
    Unexpected {
        /// Its opcode.
        opcode: Opcode,
    },
    /// A value of the configuration is too long for a packet.
    #[error("{what} does not fit a packet: use a shorter one")]
    TooLong {
        /// The value.
        what: &'static str,
    },
}

impl BootstrapError {
    /// The status in the server's answer, if there is one.
    #[must_use]
    pub const fn status(&self) -> Option<Status> {
        match self {
            Self::AuthenticationFailed { .. } => Some(Status::AUTH_ERROR),
            Self::TokenStale => Some(Status::AUTH_STALE),
            Self::BucketNotFound { .. } => Some(Status::KEY_ENOENT),
            Self::BucketAccess { .. } | Self::DcpAccess => Some(Status::EACCESS),
            Self::ControlRefused { status, .. }
            | Self::NoConfig { status }
            | Self::TokenRefused { status, .. }
            | Self::Status { status, .. } => Some(*status),
            _ => None,
        }
    }
}
