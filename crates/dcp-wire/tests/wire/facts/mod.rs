//! What the packets of a recording say agrees with what is known of it from outside the stream:
//! the facts in its first line.

mod answers;
mod documents;
mod timeline;

use std::collections::{BTreeMap, BTreeSet};

use dcp_test::facts::hex_u64;
use dcp_test::traces::{self, EventKind, Scenario};
use dcp_wire::message::{Message, Request, Response, StreamRequest};
use dcp_wire::{Frame, MAX_BODY_LEN, Opaque, Vbuuid};
use serde_json::Value;

/// Facts of each kind that were checked, and those that did not hold.
#[derive(Default)]
struct Facts {
    checked: BTreeMap<&'static str, usize>,
    wrong: Vec<String>,
    scenario: String,
}

impl Facts {
    fn check(&mut self, kind: &'static str, holds: bool, what: impl FnOnce() -> String) {
        *self.checked.entry(kind).or_default() += 1;
        if !holds {
            self.wrong.push(format!("{}: {kind}: {}", self.scenario, what()));
        }
    }
}

/// One packet of a recording, taken apart.
struct Packet<'a> {
    conn: u32,
    from_client: bool,
    frame: Frame<'a>,
    message: Option<Message<'a>>,
}

impl<'a> Packet<'a> {
    fn request(&self) -> Option<&Request<'a>> {
        match &self.message {
            Some(Message::Request(request)) => Some(request),
            _ => None,
        }
    }

    fn response(&self) -> Option<&Response<'a>> {
        match &self.message {
            Some(Message::Response(response)) => Some(response),
            _ => None,
        }
    }

    fn is_response(&self) -> bool {
        self.frame.header.magic.is_response()
    }

    fn status(&self) -> u64 {
        self.frame.header.status().0.into()
    }
}

/// A recording, taken apart.
struct Recording<'a> {
    scenario: &'a Scenario,
    packets: Vec<Packet<'a>>,
}

impl<'a> Recording<'a> {
    fn new(scenario: &'a Scenario) -> Self {
        let packets = scenario.events.iter().filter_map(|event| {
            let (frame, _) = Frame::parse(event.packet()?, MAX_BODY_LEN).ok()??;
            let from_client = matches!(event.kind, EventKind::ClientPacket(_));
            let message = Message::decode(&frame).ok();
            Some(Packet { conn: event.conn, from_client, frame, message })
        });
        Self { scenario, packets: packets.collect() }
    }

    fn expected(&self, name: &str) -> Option<&'a Value> {
        self.scenario.expected.get(name)
    }

    /// What the server answered to an opaque, on one connection or any.
    fn answers(&self, conn: Option<u32>, opaque: Opaque) -> impl Iterator<Item = &Packet<'a>> {
        self.packets.iter().filter(move |packet| {
            !packet.from_client
                && packet.is_response()
                && packet.frame.header.opaque == opaque
                && conn.is_none_or(|conn| conn == packet.conn)
        })
    }

    /// Stream requests, each with its answer.
    fn stream_requests(
        &self,
    ) -> impl Iterator<Item = (StreamRequest<'a>, Option<&Packet<'a>>)> + '_ {
        self.packets.iter().enumerate().filter_map(|(index, packet)| {
            let Some(Request::StreamRequest(request, _)) = packet.request() else { return None };
            let mut after = self.packets.iter().skip(index);
            let answer = after.find(|answer| {
                answer.conn == packet.conn
                    && answer.is_response()
                    && answer.frame.header.opcode == packet.frame.header.opcode
                    && answer.frame.header.opaque == request.opaque
            });
            Some((*request, answer))
        })
    }

    /// Every failover log the server told.
    fn failover_logs(&self) -> Vec<Vec<(u64, u64)>> {
        let logs = self.packets.iter().filter_map(|packet| match packet.response()? {
            Response::FailoverLog(log) => {
                Some(log.map(|entry| (entry.vbuuid.0, entry.seqno.0)).collect())
            }
            _ => None,
        });
        logs.collect()
    }

    fn vbuuids(&self) -> BTreeSet<Vbuuid> {
        self.failover_logs().into_iter().flatten().map(|(vbuuid, _)| Vbuuid(vbuuid)).collect()
    }
}

#[test]
fn packets_that_decode_agree_with_what_is_known_outside_the_stream() {
    let mut facts = Facts::default();
    for scenario in Scenario::load_all().unwrap() {
        facts.scenario.clone_from(&scenario.name);
        let recording = Recording::new(&scenario);
        timeline::check(&recording, &mut facts);
        documents::check(&recording, &mut facts);
        answers::check(&recording, &mut facts);
    }
    let total: usize = facts.checked.values().sum();
    println!("{total} facts checked: {:#?}", facts.checked);
    assert!(facts.wrong.is_empty(), "{} wrong:\n{}", facts.wrong.len(), facts.wrong.join("\n"));
    // A kind that is no longer found would otherwise go unnoticed.
    if traces::is_own_folder() {
        assert!(total > 3_500, "only {total} facts");
        assert!(facts.checked.len() >= 30, "only {} kinds", facts.checked.len());
    }
}
