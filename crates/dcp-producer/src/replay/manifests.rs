//! The collections of a recording: manifests and the events that lead from one to the next.

use dcp_wire::message::SystemEventId;
use dcp_wire::{CollectionId, ManifestUid, ScopeId};
use serde_json::Value;

use crate::bucket::{Collection, CollectionSettings, Manifest, Scope, StagedEvent};

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
        Self { uid: 0, scopes: vec![(0, "_default".to_owned(), vec![default])] }
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
        Self { uid: hex(&json["uid"]), scopes }
    }

    pub(super) fn manifest(&self) -> Manifest {
        let collection = |member: &Member| Collection {
            id: CollectionId(member.id),
            name: member.name.clone(),
            settings: CollectionSettings { max_ttl: member.max_ttl, history: false },
            flush_uid: ManifestUid(0),
        };
        let scope = |(id, name, members): &(u32, String, Vec<Member>)| Scope {
            id: ScopeId(*id),
            name: name.clone(),
            collections: members.iter().map(collection).collect(),
        };
        Manifest::staged(ManifestUid(self.uid), self.scopes.iter().map(scope).collect())
    }

    fn member(&self, id: u32) -> Option<&Member> {
        self.scopes.iter().flat_map(|(.., members)| members).find(|member| member.id == id)
    }

    /// The events that lead to `next`, in the server's order: collections dropped, then changed,
    /// then scope by scope, the newest first, what is new, then scopes dropped.
    pub(super) fn events_to(&self, next: &Self) -> Vec<StagedEvent> {
        let mut events = Vec::new();
        for (scope, _, members) in &self.scopes {
            for gone in members.iter().filter(|member| next.member(member.id).is_none()) {
                let dropped = Member { name: String::new(), max_ttl: None, ..gone.clone() };
                events.push((SystemEventId::END_COLLECTION, *scope, Some(dropped)));
            }
        }
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
        let last = events.len().saturating_sub(1);
        let uid = |index| if index == last { next.uid } else { self.uid };
        let staged = events.into_iter().enumerate();
        staged
            .map(|(index, (id, scope, member))| staged_event(id, uid(index), scope, member))
            .collect()
    }

    /// Follows an event that was seen.
    pub(super) fn follow(&mut self, event: &StagedEvent) {
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

fn staged_event(id: SystemEventId, uid: u64, scope: u32, member: Option<Member>) -> StagedEvent {
    let of_scope = matches!(id, SystemEventId::CREATE_SCOPE | SystemEventId::DROP_SCOPE);
    let collection = member.as_ref().filter(|_| !of_scope);
    StagedEvent {
        id,
        manifest_uid: ManifestUid(uid),
        scope_id: ScopeId(scope),
        collection_id: collection.map(|member| CollectionId(member.id)),
        max_ttl: member.as_ref().and_then(|member| member.max_ttl),
        name: member.map_or_else(String::new, |member| member.name),
    }
}
