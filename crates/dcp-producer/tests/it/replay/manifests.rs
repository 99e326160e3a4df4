//! The collections of a recording: manifests and the events that lead from one to the next.

use std::collections::BTreeMap;

use dcp_producer::ServerVersion;
use dcp_wire::message::SystemEventId;
use dcp_wire::{CollectionId, ManifestUid, ScopeId};
use serde_json::{Value, json};

/// First id of what is made up: nothing recorded has such.
const MADE_UP: u32 = 1 << 30;

/// A system event.
#[derive(Clone, Debug)]
pub(super) struct Event {
    pub(super) id: SystemEventId,
    pub(super) manifest_uid: ManifestUid,
    pub(super) scope_id: ScopeId,
    /// The collection, if the event concerns one.
    pub(super) collection_id: Option<CollectionId>,
    pub(super) name: String,
    pub(super) max_ttl: Option<u32>,
}

/// The manifests of recordings that do not show theirs; most went to the second one at once.
pub(super) const USUAL: &str = r#"[
    {"uid":"2","scopes":[
        {"name":"_default","uid":"0","collections":[{"name":"_default","uid":"0"},
            {"name":"fruit","uid":"8"},{"name":"meat","uid":"9","maxTTL":3600}]},
        {"name":"shop","uid":"8","collections":[
            {"name":"big","uid":"8a"},{"name":"veg","uid":"a"}]}]},
    {"uid":"1","scopes":[{"name":"_default","uid":"0","collections":[
        {"name":"_default","uid":"0"},{"name":"fruit","uid":"8"}]}]}]"#;

/// Scopes and collections at a moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Model {
    pub(super) uid: u64,
    scopes: Vec<(u32, String, Vec<Member>)>,
    /// How many scopes are made up, which take seqnos that nobody is shown.
    hidden: u32,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Member {
    id: u32,
    name: String,
    max_ttl: Option<u32>,
}

impl Default for Model {
    fn default() -> Self {
        let default = Member { id: 0, name: "_default".to_owned(), max_ttl: None };
        Self { uid: 0, scopes: vec![(0, "_default".to_owned(), vec![default])], hidden: 0 }
    }
}

fn hex(value: &Value) -> u64 {
    u64::from_str_radix(value.as_str().unwrap(), 16).unwrap()
}

fn id(value: &Value) -> u32 {
    hex(value).try_into().unwrap()
}

impl Model {
    pub(super) fn read(json: &Value) -> Self {
        let text = |value: &Value| value["name"].as_str().unwrap().to_owned();
        let member = |value: &Value| Member {
            id: id(&value["uid"]),
            name: text(value),
            max_ttl: value["maxTTL"].as_u64().map(|ttl| ttl.try_into().unwrap()),
        };
        let scope = |value: &Value| {
            let members = value["collections"].as_array().unwrap();
            (id(&value["uid"]), text(value), members.iter().map(member).collect())
        };
        let scopes = json["scopes"].as_array().unwrap().iter().map(scope).collect();
        Self { uid: hex(&json["uid"]), scopes, hidden: 0 }
    }

    /// The manifest as a data folder keeps it.
    pub(super) fn to_json(&self) -> String {
        let collection = |member: &Member| json!({"name": member.name, "uid": format!("{:x}", member.id), "maxTTL": member.max_ttl});
        let scope = |(id, name, members): &(u32, String, Vec<Member>)| {
            let collections: Vec<_> = members.iter().map(collection).collect();
            json!({"name": name, "uid": format!("{id:x}"), "collections": collections})
        };
        let mut scopes: Vec<_> = self.scopes.iter().map(scope).collect();
        let made_up =
            (0..self.hidden).map(|number| (MADE_UP + number, format!("made up {number}")));
        scopes.extend(made_up.map(|(id, name)| scope(&(id, name, Vec::new()))));
        let next = MADE_UP + self.hidden;
        json!({
            "manifest": {"uid": format!("{:x}", self.uid), "scopes": scopes},
            "next_scope": next,
            "next_collection": next,
        })
        .to_string()
    }

    /// This manifest with the scopes that `other` has made up.
    pub(super) fn hiding_as(&self, other: &Self) -> Self {
        Self { hidden: other.hidden, ..self.clone() }
    }

    /// Makes up another scope.
    pub(super) fn hide(&mut self) {
        self.hidden += 1;
    }

    fn member(&self, id: u32) -> Option<&Member> {
        self.scopes.iter().flat_map(|(.., members)| members).find(|member| member.id == id)
    }

    /// The events that lead to `next`, in the server's order: collections dropped, then changed,
    /// then scope by scope, the newest first, what is new, then scopes dropped. Drops come in the
    /// order of a hash table, which `shown` tells.
    pub(super) fn events_to(
        &self,
        next: &Self,
        version: ServerVersion,
        shown: &BTreeMap<u64, Event>,
    ) -> Vec<Event> {
        let mut events = Vec::new();
        for (scope, _, members) in &self.scopes {
            for gone in members.iter().filter(|member| next.member(member.id).is_none()) {
                let dropped = Member { name: String::new(), max_ttl: None, ..gone.clone() };
                events.push((SystemEventId::END_COLLECTION, *scope, Some(dropped)));
            }
        }
        events.sort_by_key(|(id, _, member)| {
            let collection = member.as_ref().map(|member| CollectionId(member.id));
            let is_it = |event: &&Event| event.id == *id && event.collection_id == collection;
            let seqno = shown.iter().find(|(_, event)| is_it(event)).map(|(seqno, _)| *seqno);
            seqno.unwrap_or(u64::MAX)
        });
        for (scope, _, members) in &next.scopes {
            for member in members {
                if self.member(member.id).is_some_and(|known| known != member) {
                    events.push((SystemEventId::MODIFY_COLLECTION, *scope, Some(member.clone())));
                }
            }
        }
        for (scope, name, members) in next.scopes.iter().rev() {
            if self.scopes.iter().all(|(known, ..)| known != scope) {
                let named = Member { id: 0, name: name.clone(), max_ttl: None };
                events.push((SystemEventId::CREATE_SCOPE, *scope, Some(named)));
            }
            for new in members.iter().filter(|member| self.member(member.id).is_none()) {
                events.push((SystemEventId::BEGIN_COLLECTION, *scope, Some(new.clone())));
            }
        }
        for (scope, ..) in &self.scopes {
            if next.scopes.iter().all(|(kept, ..)| kept != scope) {
                events.push((SystemEventId::DROP_SCOPE, *scope, None));
            }
        }
        // Before 8.0 changes of settings do not count.
        let counts = |(id, ..): &(SystemEventId, u32, Option<Member>)| {
            version.is_at_least(8, 0) || *id != SystemEventId::MODIFY_COLLECTION
        };
        let last = events.iter().rposition(counts).unwrap_or(events.len().saturating_sub(1));
        let uid = |index| if index < last { self.uid } else { next.uid };
        let numbered = events.into_iter().enumerate();
        numbered.map(|(index, (id, scope, member))| event(id, uid(index), scope, member)).collect()
    }

    /// Follows an event that was seen.
    pub(super) fn follow(&mut self, event: &Event) {
        self.uid = event.manifest_uid.0;
        let (scope, name) = (event.scope_id.0, event.name.clone());
        let id = event.collection_id.map_or(0, |id| id.0);
        match event.id {
            SystemEventId::CREATE_SCOPE => self.scopes.push((scope, name, Vec::new())),
            SystemEventId::DROP_SCOPE => self.scopes.retain(|(known, ..)| *known != scope),
            SystemEventId::END_COLLECTION => {
                self.scopes.iter_mut().for_each(|(.., all)| all.retain(|known| known.id != id));
            }
            _ => {
                let scope = self.scopes.iter_mut().find(|(known, ..)| *known == scope);
                let members = &mut scope.unwrap().2;
                members.retain(|known| known.id != id);
                members.push(Member { id, name, max_ttl: event.max_ttl });
            }
        }
    }
}

fn event(id: SystemEventId, uid: u64, scope: u32, member: Option<Member>) -> Event {
    let of_scope = matches!(id, SystemEventId::CREATE_SCOPE | SystemEventId::DROP_SCOPE);
    let collection = member.as_ref().filter(|_| !of_scope);
    Event {
        id,
        manifest_uid: ManifestUid(uid),
        scope_id: ScopeId(scope),
        collection_id: collection.map(|member| CollectionId(member.id)),
        max_ttl: member.as_ref().and_then(|member| member.max_ttl),
        name: member.map_or_else(String::new, |member| member.name),
    }
}
