//! The options of connections and streams.

use std::collections::BTreeMap;
use std::time::Duration;

use dcp_arrow::{Column, TableOptions, TableSchema};
use dcp_consumer::{
    Acknowledge, BackfillOrder, BatchPolicy, ClientCertificate, ConnectOptions, Credentials,
    CredentialsSource, End, Filter, InitialDeletions, OnPurge, OnRollback, Pem, Priority,
    SrvTargets, Start, StreamOptions, TlsOptions,
};
use dcp_proto::consumer::Token;
use dcp_proto::plan::{Limits, Offsets};
use dcp_proto::topology::{Network, NetworkSelection};
use dcp_proto::{Op, RowFilter};
use dcp_wire::sasl::Mechanism;
use dcp_wire::{Seqno, Vbid};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyDateTime, PyDict, PyFloat, PyInt, PySequence, PyString};

use crate::arguments::{
    ANY, Arguments, DAY, VBUCKETS, conflict, integer, integer_in, invalid, one_of, wrong_type,
};
use crate::checkpoint::Checkpoint;
use crate::credentials::{callable, token_callable};
use crate::error::Failure;
use crate::producer::options as producer;
use crate::schema::{Include, include, read_documents, table};

/// `dcp_rs.ConnectionOptions`: how to connect, and the settings of every stream's connections.
pub(crate) struct Connection {
    pub(crate) options: ConnectOptions,
    pub(crate) settings: ConnectionSettings,
}

/// Settings of the connections of every stream, which are options of a stream in the engine.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ConnectionSettings {
    pub(crate) retry_timeout: Duration,
    noop_interval: Duration,
    buffer_size: u32,
    compressed: bool,
}

impl Connection {
    pub(crate) fn read(arguments: &Arguments<'_>) -> PyResult<Self> {
        let mut options = ConnectOptions::new(arguments.text("connection_string", "")?);
        options.credentials = credentials(arguments)?;
        options.tls = tls(arguments)?;
        options.bucket = arguments.optional_text("bucket")?;
        options.name = arguments.text("name", &options.name)?;
        let timeout = options.connect_timeout;
        options.connect_timeout = arguments.seconds("connect_timeout", timeout, 0.001..=DAY)?;
        let keep = options.keep_connections;
        options.keep_connections = arguments.seconds("keep_connections", keep, 0.0..=DAY)?;
        let networks = [
            ("auto", NetworkSelection::Auto),
            ("default", NetworkSelection::Fixed(Network::Default)),
            ("external", NetworkSelection::Fixed(Network::External)),
        ];
        options.network = arguments.word("network", options.network, &networks)?;
        let targets = [("same_domain", SrvTargets::SameDomain), ("any", SrvTargets::Any)];
        options.srv_targets = arguments.word("srv_targets", options.srv_targets, &targets)?;
        let all = Mechanism::PASSWORD.map(|mechanism| (mechanism.name(), mechanism));
        let mechanism = |name: String| {
            let name = PyString::new(arguments.py(), &name);
            one_of("sasl_mechanisms", name.as_any(), &all, None)
        };
        // The check would exhaust an iterator.
        if let Some(given) = arguments.optional("sasl_mechanisms")?
            && given.cast::<PySequence>().is_err()
        {
            return Err(wrong_type("sasl_mechanisms", &given, "a list of names"));
        }
        let names = arguments.names("sasl_mechanisms")?;
        options.sasl_mechanisms =
            names.map(|names| names.into_iter().map(mechanism).collect()).transpose()?;
        Ok(Self { options, settings: ConnectionSettings::read(arguments)? })
    }
}

impl ConnectionSettings {
    fn read(arguments: &Arguments<'_>) -> PyResult<Self> {
        let default = StreamOptions::default();
        let sizes = StreamOptions::MIN_BUFFER_SIZE.into()..=u32::MAX.into();
        Ok(Self {
            retry_timeout: arguments.seconds("retry_timeout", default.retry_timeout, 0.0..=DAY)?,
            noop_interval: arguments.seconds(
                "noop_interval",
                default.noop_interval,
                1.0..=3600.0,
            )?,
            buffer_size: arguments.integer("buffer_size", default.buffer_size, sizes)?,
            compressed: arguments.flag("compressed", default.compressed)?,
        })
    }
}

/// The source of a token, unless none is given; nothing else may be given then.
fn token(arguments: &Arguments<'_>) -> PyResult<Option<CredentialsSource>> {
    let (given, file) = (arguments.optional("token")?, arguments.path("token_file")?);
    let option = match (&given, &file) {
        (None, None) => return Ok(None),
        (Some(_), Some(_)) => return Err(conflict(&["token", "token_file"], "give one of them")),
        (Some(_), None) => "token",
        (None, Some(_)) => "token_file",
    };
    if arguments.optional("username")?.is_some() {
        return Err(conflict(&[option, "username"], "a token names its user: give one of them"));
    }
    for other in ["password", "password_file", "credentials", "tls_certificate"] {
        if arguments.optional(other)?.is_some() {
            return Err(conflict(&[option, other], "give one of them"));
        }
    }
    match (given, file) {
        (Some(given), _) if given.is_callable() => Ok(Some(token_callable(given.unbind()))),
        (Some(given), _) => {
            let Ok(text) = given.extract::<String>() else {
                return Err(wrong_type("token", &given, "text or a function"));
            };
            let token =
                Token::new(text).map_err(|error| conflict(&["token"], error.to_string()))?;
            Ok(Some(CredentialsSource::Token(token)))
        }
        (None, file) => Ok(file.map(CredentialsSource::TokenFile)),
    }
}

fn credentials(arguments: &Arguments<'_>) -> PyResult<Option<CredentialsSource>> {
    if let Some(token) = token(arguments)? {
        return Ok(Some(token));
    }
    let username = arguments.optional_text("username")?;
    let password = arguments.optional_text("password")?;
    let file = arguments.path("password_file")?;
    let function = arguments.optional("credentials")?;
    if let Some(function) = function {
        if !function.is_callable() {
            return Err(wrong_type("credentials", &function, "a function"));
        }
        for other in ["username", "password", "password_file", "tls_certificate"] {
            if arguments.optional(other)?.is_some() {
                return Err(conflict(&["credentials", other], "give one of them"));
            }
        }
        return Ok(Some(callable(function.unbind())));
    }
    match (username, password, file) {
        (_, Some(_), Some(_)) => Err(conflict(&["password", "password_file"], "give one of them")),
        (Some(username), Some(password), None) => {
            Ok(Some(Credentials::new(username, password).into()))
        }
        (Some(username), None, Some(path)) => {
            Ok(Some(CredentialsSource::PasswordFile { username, path }))
        }
        (None, None, None) => Ok(None),
        _ => Err(conflict(&["username", "password"], "give both or neither")),
    }
}

fn tls(arguments: &Arguments<'_>) -> PyResult<TlsOptions> {
    let key_password = arguments.optional_text("tls_key_password")?.map(Into::into);
    let client_certificate = match (arguments.path("tls_certificate")?, arguments.path("tls_key")?)
    {
        (Some(chain), Some(key)) => {
            Some(ClientCertificate { chain: Pem::File(chain), key: Pem::File(key), key_password })
        }
        (None, None) if key_password.is_some() => {
            let problem = "needs a client certificate and its key";
            return Err(conflict(&["tls_key_password"], problem));
        }
        (None, None) => None,
        _ => return Err(conflict(&["tls_certificate", "tls_key"], "give both or neither")),
    };
    let mut tls = TlsOptions::default();
    tls.ca = arguments.path("tls_ca")?.map(Pem::File);
    tls.client_certificate = client_certificate;
    Ok(tls)
}

/// The options of `Client.stream`, except those of its table.
pub(crate) fn stream(
    arguments: &Arguments<'_>,
    settings: ConnectionSettings,
    table: &TableSchema,
) -> PyResult<StreamOptions> {
    let mut options = StreamOptions::default();
    let ack = [("next", Acknowledge::OnNext), ("manual", Acknowledge::Manual)];
    options.start = start(arguments)?;
    options.end = end(arguments)?;
    options.vbuckets = arguments.vbuckets()?;
    options.content.values = table.needs(Column::Value);
    options.content.xattrs = table.needs(Column::Xattrs);
    options.filter = filter(arguments)?;
    options.rows = rows(arguments)?;
    if let Some(given) = arguments.optional("batch")? {
        options.batch = batch(&Arguments::new(given.cast_into()?))?;
    }
    options.buffer_size = settings.buffer_size;
    options.persisted_only = arguments.flag("persisted_only", options.persisted_only)?;
    let include = include(arguments)?;
    options.system_documents = include.contains(&Include::SystemDocuments);
    options.history = include.contains(&Include::History);
    options.on_purge = arguments.word("on_purge", options.on_purge, &ON_PURGE)?;
    options.out_of_order = arguments.flag("out_of_order", options.out_of_order)?;
    options.initial_deletions =
        arguments.word("initial_deletions", options.initial_deletions, &INITIAL_DELETIONS)?;
    let priorities = Priority::ALL.map(|it| (it.name(), it));
    options.priority = arguments.optional_word("priority", &priorities)?;
    let orders = BackfillOrder::ALL.map(|it| (it.name(), it));
    options.backfill_order = arguments.optional_word("backfill_order", &orders)?;
    options.caught_up = table.system_events();
    options.compressed = settings.compressed;
    options.on_rollback = arguments.word("on_rollback", options.on_rollback, &ON_ROLLBACK)?;
    options.acknowledge = arguments.word("ack", options.acknowledge, &ack)?;
    options.noop_interval = settings.noop_interval;
    options.retry_timeout = settings.retry_timeout;
    Ok(options)
}

/// `dcp_rs.BatchPolicy`.
fn batch(arguments: &Arguments<'_>) -> PyResult<BatchPolicy> {
    let mut policy = BatchPolicy::default();
    let max_bytes = BatchPolicy::MAX_BYTES as u64;
    policy.max_rows = arguments.integer("max_rows", policy.max_rows, 1..=10_000_000)?;
    policy.max_bytes = arguments.integer("max_bytes", policy.max_bytes, 1..=max_bytes)?;
    policy.linger = arguments.seconds("linger", policy.linger, 0.0..=3600.0)?;
    Ok(policy)
}

/// Where to start.
fn start(arguments: &Arguments<'_>) -> PyResult<Start> {
    let Some(given) = arguments.get("start", "earliest")? else { return Ok(Start::Earliest) };
    if let Ok(checkpoint) = given.extract::<Checkpoint>() {
        return Ok(Start::Checkpoint(checkpoint.0));
    }
    let expected = "'earliest', 'latest', a Checkpoint or a CheckpointStore";
    let Ok(word) = given.extract::<String>() else {
        return Err(wrong_type("start", &given, expected));
    };
    match word.as_str() {
        "earliest" => Ok(Start::Earliest),
        "latest" => Ok(Start::Latest),
        // Suggest no keyword: `latest` for a misspelt `earliest` would skip all existing changes.
        _ => {
            let shown = given.repr()?;
            let hint = if word.contains('.') {
                format!(": read on from a file with dcp_rs.FileStore({shown})")
            } else {
                String::new()
            };
            Err(invalid("start", format!("must be {expected}, not {shown}{hint}"), &given))
        }
    }
}

/// Where to end.
fn end(arguments: &Arguments<'_>) -> PyResult<End> {
    let Some(given) = arguments.optional("until")? else { return Ok(End::Never) };
    if given.is_instance_of::<PyString>() {
        return one_of("until", &given, &[("now", ())], None).map(|()| End::Now);
    }
    // Anything that `dict()` accepts.
    let seqnos = given.py().get_type::<PyDict>().call1((&given,));
    let seqnos = seqnos
        .map_err(|_| wrong_type("until", &given, "None, 'now' or seqnos by vBucket"))?
        .cast_into::<PyDict>()?;
    if seqnos.is_empty() {
        return Err(invalid("until", "names no vBucket", &given));
    }
    let seqno = |(vbucket, seqno): (Bound<'_, PyAny>, Bound<'_, PyAny>)| {
        let vbucket = integer_in("until", "vBucket: ", &vbucket, &VBUCKETS)?;
        Ok((Vbid(vbucket), Seqno(integer_in("until", "seqno: ", &seqno, &ANY)?)))
    };
    Ok(End::At(seqnos.iter().map(seqno).collect::<PyResult<_>>()?))
}

/// Collections are named as `scope.collection`, or alone in the default scope.
pub(crate) fn filter(arguments: &Arguments<'_>) -> PyResult<Filter> {
    let Some(collections) = arguments.one_or_more("collections", "a name or a list of names")?
    else {
        return Ok(Filter::All);
    };
    if collections.is_empty() {
        return Err(conflict(&["collections"], "names no collection"));
    }
    let qualify = |name: String| if name.contains('.') { name } else { format!("_default.{name}") };
    Ok(Filter::Collections(collections.into_iter().map(qualify).collect()))
}

/// Filters of document changes.
fn rows(arguments: &Arguments<'_>) -> PyResult<RowFilter> {
    let keys = arguments.one_or_more("keys", "a pattern or a list of patterns")?;
    let words = Op::ALL.map(|op| (op.name(), op));
    let op =
        |name: String| one_of("ops", PyString::new(arguments.py(), &name).as_any(), &words, None);
    let ops = arguments.one_or_more("ops", "an operation or a list of operations")?;
    let ops = ops.map(|ops| ops.into_iter().map(op).collect::<PyResult<_>>()).transpose()?;
    let since = arguments.optional("since")?.map(|since| nanoseconds(&since)).transpose()?;
    Ok(RowFilter::new(keys, ops, since).map_err(Failure::from)?)
}

/// A point in time, as `datetime` or seconds since 1970.
fn nanoseconds(since: &Bound<'_, PyAny>) -> PyResult<u64> {
    let seconds = if since.is_instance_of::<PyDateTime>() {
        if since.call_method0("utcoffset")?.is_none() {
            let shown = since.repr()?;
            let problem = format!("{shown} has no time zone: give it one, such as UTC");
            return Err(invalid("since", problem, since));
        }
        since.call_method0("timestamp")?
    } else if since.is_instance_of::<PyFloat>()
        || (since.is_instance_of::<PyInt>() && !since.is_instance_of::<PyBool>())
    {
        since.clone()
    } else {
        return Err(wrong_type("since", since, "a datetime or seconds since 1970"));
    };
    let seconds = seconds.extract().ok().filter(|seconds: &f64| *seconds >= 0.0);
    let since_1970 = seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    let nanoseconds = since_1970.and_then(|time| u64::try_from(time.as_nanos()).ok());
    nanoseconds
        .ok_or_else(|| invalid("since", format!("{since} is not a time from 1970 to 2554"), since))
}

/// Keywords of `on_rollback`.
const ON_ROLLBACK: [(&str, OnRollback); 3] =
    [("emit", OnRollback::Emit), ("fail", OnRollback::Fail), ("resync", OnRollback::Resync)];

/// Keywords of `initial_deletions`.
const INITIAL_DELETIONS: [(&str, InitialDeletions); 3] = [
    ("deliver", InitialDeletions::Deliver),
    ("skip", InitialDeletions::Skip),
    ("skip_if_supported", InitialDeletions::SkipIfSupported),
];

/// Keywords of `on_purge`.
const ON_PURGE: [(&str, OnPurge); 3] =
    [("fail", OnPurge::Fail), ("resync", OnPurge::Resync), ("ignore", OnPurge::Ignore)];

/// The options of a plan: the limits of a batch.
pub(crate) fn limits(arguments: &Arguments<'_>) -> PyResult<Limits> {
    let mut limits = Limits::default();
    let most = arguments.optional("max_seqnos")?;
    let until = arguments.optional_text("until")?;
    limits.max_seqnos = most.map(|most| integer("max_seqnos", &most, &ANY)).transpose()?;
    limits.until =
        until.map(|json| Offsets::from_json(&json)).transpose().map_err(Failure::from)?;
    limits.persisted_only = arguments.flag("persisted_only", limits.persisted_only)?;
    limits.on_rollback = arguments.word("on_rollback", limits.on_rollback, &ON_ROLLBACK)?;
    limits.on_purge = arguments.word("on_purge", limits.on_purge, &ON_PURGE)?;
    limits.is_last = arguments.flag("is_last", limits.is_last)?;
    Ok(limits)
}

/// Checks the options of a connection.
#[pyfunction]
pub(crate) fn check_connection(options: Bound<'_, PyDict>) -> PyResult<()> {
    Connection::read(&Arguments::new(options)).map(drop)
}

/// Checks a `dcp_rs.BatchPolicy`.
#[pyfunction]
pub(crate) fn check_batch(options: Bound<'_, PyDict>) -> PyResult<()> {
    batch(&Arguments::new(options)).map(drop)
}

/// Checks the options of a stream.
#[pyfunction]
pub(crate) fn check_stream(options: Bound<'_, PyDict>) -> PyResult<()> {
    let arguments = Arguments::new(options);
    let options = stream(&arguments, ConnectionSettings::read(&arguments)?, &table(&arguments)?)?;
    Ok(options.check().map_err(Failure::from)?)
}

/// The defaults of options by group and name.
#[pyfunction]
pub(crate) fn defaults(py: Python<'_>) -> PyResult<BTreeMap<&'static str, Bound<'_, PyDict>>> {
    let none = || Arguments::new(PyDict::new(py));
    let (connection, of_stream, of_batch, documents) = (none(), none(), none(), none());
    let settings = Connection::read(&connection)?.settings;
    stream(&of_stream, settings, &table(&of_stream)?)?;
    batch(&of_batch)?;
    read_documents(&documents, &mut TableOptions::default())?;
    let (plan, of_cluster, of_limits) = (none(), none(), none());
    limits(&plan)?;
    let mut options = producer::cluster(&of_cluster)?;
    producer::limits(&of_limits, &mut options)?;
    let all = [
        ("connection", connection),
        ("stream", of_stream),
        ("batch", of_batch),
        ("documents", documents),
        ("plan", plan),
        ("cluster", of_cluster),
        ("limits", of_limits),
    ];
    Ok(all.map(|(name, arguments)| (name, arguments.into_defaults())).into())
}
