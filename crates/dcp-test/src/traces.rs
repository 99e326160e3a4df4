//! Packets recorded from real servers: `tests/traces`, described in its README.

use std::path::{Path, PathBuf};
use std::{fs, io};

use serde::Deserialize;
use thiserror::Error;

use crate::{parse_hex, tests_folder};

/// Environment variable that names another folder of recordings for tests of all recordings. Tests
/// that name a recording still use the project's.
pub const FOLDER_VARIABLE: &str = "DCP_TRACES";

/// A recording that could not be read.
#[derive(Debug, Error)]
pub enum TraceError {
    /// The file or folder could not be read.
    #[error("cannot read {path}: {source}")]
    Read {
        /// The path.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The folder contains no recordings, so nothing would be tested.
    #[error("there is no recording in {path}: check that its *.jsonl files are there")]
    Nothing {
        /// The folder.
        path: PathBuf,
    },
    /// A line does not have the recording format.
    #[error("{path}, line {line}: {reason}")]
    Format {
        /// The file.
        path: PathBuf,
        /// Line, counted from 1.
        line: usize,
        /// The problem.
        reason: String,
    },
}

/// One recorded scenario.
#[derive(Clone, Debug)]
pub struct Scenario {
    /// Name of the file without its extension: version and scenario.
    pub name: String,
    /// Version of the server.
    pub server: String,
    /// What it calls itself, whatever the file is called.
    pub title: String,
    /// Description of the scenario.
    pub what: String,
    /// vBuckets involved.
    pub vbuckets: Vec<u16>,
    /// Facts known from outside the DCP stream.
    pub expected: serde_json::Value,
    /// What happened, in order.
    pub events: Vec<Event>,
}

/// An event on a connection.
#[derive(Clone, Debug)]
pub struct Event {
    /// Number of the connection in the scenario.
    pub conn: u32,
    /// What happened.
    pub kind: EventKind,
}

/// What happened on a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EventKind {
    /// The client sent a packet.
    ClientPacket(Vec<u8>),
    /// The server sent a packet.
    ServerPacket(Vec<u8>),
    /// The server closed the connection.
    ServerClosed,
}

impl Event {
    /// The packet, sent by either side.
    #[must_use]
    pub fn packet(&self) -> Option<&[u8]> {
        match &self.kind {
            EventKind::ClientPacket(bytes) | EventKind::ServerPacket(bytes) => Some(bytes),
            EventKind::ServerClosed => None,
        }
    }
}

#[derive(Deserialize)]
struct MetaLine {
    meta: Meta,
}

#[derive(Deserialize)]
struct Meta {
    server: String,
    #[serde(default)]
    scenario: String,
    what: String,
    #[serde(default)]
    vbuckets: Vec<u16>,
    #[serde(default)]
    expected: serde_json::Value,
}

#[derive(Deserialize)]
struct EventLine {
    dir: String,
    #[serde(default)]
    conn: u32,
    hex: Option<String>,
    #[serde(default)]
    eof: bool,
}

/// The folder of recordings: that of [`FOLDER_VARIABLE`], or the project's.
#[must_use]
pub fn folder() -> PathBuf {
    std::env::var_os(FOLDER_VARIABLE).map_or_else(own_folder, PathBuf::from)
}

fn own_folder() -> PathBuf {
    tests_folder("traces")
}

/// Whether [`folder`] is the project's, for which tests know names and counts. For other folders
/// they only use the contents of the packets.
#[must_use]
pub fn is_own_folder() -> bool {
    let same = |folder: &Path| folder.canonicalize().ok();
    same(&folder()) == same(&own_folder())
}

/// Sorted paths of all recordings, at least one.
///
/// # Errors
/// [`TraceError::Read`] if the folder cannot be read, [`TraceError::Nothing`] if it holds none.
pub fn paths() -> Result<Vec<PathBuf>, TraceError> {
    paths_in(&folder())
}

fn paths_in(folder: &Path) -> Result<Vec<PathBuf>, TraceError> {
    let read = |source| TraceError::Read { path: folder.to_owned(), source };
    let mut paths = Vec::new();
    for entry in fs::read_dir(folder).map_err(read)? {
        let path = entry.map_err(read)?.path();
        if path.extension().is_some_and(|extension| extension == "jsonl") {
            paths.push(path);
        }
    }
    if paths.is_empty() {
        return Err(TraceError::Nothing { path: folder.to_owned() });
    }
    paths.sort();
    Ok(paths)
}

impl Scenario {
    /// The project's recording with this name, for example `8.0.2-noop`.
    ///
    /// # Errors
    /// [`TraceError`] if it does not exist or is malformed.
    pub fn load(name: &str) -> Result<Self, TraceError> {
        Self::read(&own_folder().join(format!("{name}.jsonl")))
    }

    /// All recordings of [`folder`], at least one.
    ///
    /// # Errors
    /// [`TraceError`] if there are none or one is malformed.
    pub fn load_all() -> Result<Vec<Self>, TraceError> {
        paths()?.iter().map(|path| Self::read(path)).collect()
    }

    /// Reads a recording.
    ///
    /// # Errors
    /// [`TraceError`] if it cannot be read or is malformed.
    pub fn read(path: &Path) -> Result<Self, TraceError> {
        let text = fs::read_to_string(path)
            .map_err(|source| TraceError::Read { path: path.to_owned(), source })?;
        let format = |line: usize, reason: String| TraceError::Format {
            path: path.to_owned(),
            line,
            reason,
        };
        let mut lines = text.lines().enumerate();
        let (_, first) = lines.next().ok_or_else(|| format(1, "the file is empty".to_owned()))?;
        let MetaLine { meta } =
            serde_json::from_str(first).map_err(|error| format(1, error.to_string()))?;
        let mut events = Vec::new();
        for (index, line) in lines {
            let event = parse_event(line).map_err(|reason| format(index + 1, reason))?;
            events.push(event);
        }
        let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        let Meta { server, scenario: title, what, vbuckets, expected } = meta;
        Ok(Self { name, server, title, what, vbuckets, expected, events })
    }

    /// Numbers of the connections, in order of first use.
    #[must_use]
    pub fn connections(&self) -> Vec<u32> {
        let mut connections = Vec::new();
        for event in &self.events {
            if !connections.contains(&event.conn) {
                connections.push(event.conn);
            }
        }
        connections
    }
}

fn parse_event(line: &str) -> Result<Event, String> {
    let line: EventLine = serde_json::from_str(line).map_err(|error| error.to_string())?;
    let packet = match &line.hex {
        None => None,
        Some(hex) => Some(parse_hex(hex).ok_or("the packet is not hex")?),
    };
    let kind = match (line.dir.as_str(), packet, line.eof) {
        ("c2s", Some(bytes), false) => EventKind::ClientPacket(bytes),
        ("s2c", Some(bytes), false) => EventKind::ServerPacket(bytes),
        ("s2c", None, true) => EventKind::ServerClosed,
        _ => return Err("neither a packet nor the end of a connection".to_owned()),
    };
    Ok(Event { conn: line.conn, kind })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn recordings_folder_that_is_empty_is_an_error() {
        let no_recordings = paths_in(&tests_folder("vectors"));
        assert!(matches!(no_recordings, Err(TraceError::Nothing { .. })), "{no_recordings:?}");
        let no_folder = paths_in(&tests_folder("no such folder"));
        assert!(matches!(no_folder, Err(TraceError::Read { .. })), "{no_folder:?}");
        assert!(!paths_in(&own_folder()).unwrap().is_empty());
    }

    #[test]
    fn recording_line_may_say_more_than_its_packet() {
        let line = r#"{"dir": "s2c", "conn": 3, "hex": "8155", "time": 1.5}"#;
        let event = parse_event(line).unwrap();
        assert_eq!((event.conn, event.kind), (3, EventKind::ServerPacket(vec![0x81, 0x55])));
        assert!(parse_event(r#"{"dir": "s2c"}"#).is_err());
        assert!(parse_event(r#"{"dir": "c2s", "eof": true}"#).is_err());
    }
}
