//! Rules as JSON.

use core::num::{NonZeroU32, NonZeroU64};
use core::time::Duration;

use dcp_wire::{Opcode, Seqno, Status, Vbid};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::{Map, Value, json};

use super::error::RuleError;
use super::reaction::{Direction, Reaction};
use super::rule::{Condition, ConnectionIs, Probability, Rule};

const RULE: &[&str] = &["name", "condition", "reaction"];
const CONDITION: &[&str] = &[
    "opcode",
    "vbucket",
    "connection",
    "node",
    "between",
    "from",
    "direction",
    "any",
    "not",
    "nth",
    "every",
    "probability",
    "seed",
];
const REACTIONS: &[&str] = &[
    "drop",
    "delay",
    "half_open",
    "disconnect",
    "disconnect_after",
    "answer",
    "not_my_vbucket",
    "rollback",
    "no_stream_end",
    "no_snapshot_end",
    "items_past_end",
    "marker_without_items",
    "seqno_advanced_before_item",
    "oso_cut",
    "truncate",
    "corrupt",
    "no_noop",
    "lag",
    "window",
];

/// Reads a list of rules.
///
/// # Errors
/// [`RuleError`] names the wrong member and its rule, and suggests a name for an unknown one.
pub fn parse_rules(text: &str) -> Result<Vec<Rule>, RuleError> {
    let Value::Array(rules) = serde_json::from_str(text)? else {
        return Err(RuleError::invalid("rules", "a list of objects"));
    };
    let rule = |(index, rule): (usize, &Value)| read_rule(rule, &format!("[{index}]"));
    rules.iter().enumerate().map(rule).collect()
}

/// The members of an object, all with known names.
struct Members<'a> {
    members: &'a Map<String, Value>,
    path: &'a str,
}

impl<'a> Members<'a> {
    fn new(
        value: &'a Value,
        path: &'a str,
        what: &'static str,
        known: &[&'static str],
    ) -> Result<Self, RuleError> {
        let members = value.as_object().ok_or_else(|| RuleError::invalid(path, "an object"))?;
        match members.keys().find(|name| !known.contains(&name.as_str())) {
            None => Ok(Self { members, path }),
            Some(name) => Err(unknown(path, what, name, known.iter().copied())),
        }
    }

    fn get(&self, name: &str) -> Option<&'a Value> {
        self.members.get(name).filter(|value| !value.is_null())
    }

    fn at(&self, name: &str) -> String {
        format!("{}.{name}", self.path)
    }

    fn number(&self, name: &str) -> Result<Option<u64>, RuleError> {
        let number = |value: &Value| {
            value.as_u64().ok_or_else(|| RuleError::invalid(self.at(name), "a whole number"))
        };
        self.get(name).map(number).transpose()
    }

    fn count(&self, name: &str) -> Result<Option<NonZeroU64>, RuleError> {
        let count = |number| {
            NonZeroU64::new(number)
                .ok_or_else(|| RuleError::invalid(self.at(name), "a whole number from 1 up"))
        };
        self.number(name)?.map(count).transpose()
    }

    fn size(&self, name: &str) -> Result<Option<usize>, RuleError> {
        let size = |number| {
            usize::try_from(number)
                .map_err(|_| RuleError::invalid(self.at(name), "a number of bytes"))
        };
        self.number(name)?.map(size).transpose()
    }

    fn text(&self, name: &str) -> Result<Option<&'a str>, RuleError> {
        let text = |value: &'a Value| {
            value.as_str().ok_or_else(|| RuleError::invalid(self.at(name), "text"))
        };
        self.get(name).map(text).transpose()
    }

    fn missing(&self, member: &'static str) -> RuleError {
        RuleError::Missing { path: self.path.to_owned(), member }
    }
}

fn unknown<'a>(
    path: &str,
    what: &'static str,
    name: &str,
    known: impl IntoIterator<Item = &'a str>,
) -> RuleError {
    let nearest = nearest(name, known);
    RuleError::UnknownName { path: path.to_owned(), what, name: name.to_owned(), nearest }
}

fn read_rule(value: &Value, path: &str) -> Result<Rule, RuleError> {
    let members = Members::new(value, path, "member", RULE)?;
    let condition = match members.get("condition") {
        Some(condition) => read_condition(condition, &members.at("condition"))?,
        None => Condition::default(),
    };
    let reaction = members.get("reaction").ok_or_else(|| members.missing("reaction"))?;
    let rule = Rule {
        name: members.text("name")?.unwrap_or_default().to_owned(),
        condition,
        reaction: read_reaction(reaction, &members.at("reaction"))?,
    };
    rule.check(path)?;
    Ok(rule)
}

fn read_condition(value: &Value, path: &str) -> Result<Condition, RuleError> {
    let members = Members::new(value, path, "condition", CONDITION)?;
    let each = |name| {
        let list = match members.get(name) {
            None => &[],
            Some(Value::Array(list)) => list.as_slice(),
            Some(one) => std::slice::from_ref(one),
        };
        list.iter()
    };
    let opcode = |value| read_opcode(value, &members.at("opcode"));
    let vbucket = |value: &Value| {
        let number = value.as_u64().and_then(|number| u16::try_from(number).ok());
        let expected = "a vBucket or a list of them";
        number.map(Vbid).ok_or_else(|| RuleError::invalid(members.at("vbucket"), expected))
    };
    let nodes = |value: &Value, name| {
        let list = value.as_array().map_or(std::slice::from_ref(value), Vec::as_slice);
        let node = |value: &Value| {
            let node = value.as_u64().and_then(|node| usize::try_from(node).ok());
            node.ok_or_else(|| RuleError::invalid(members.at(name), "nodes or lists of nodes"))
        };
        list.iter().map(node).collect::<Result<Vec<_>, _>>()
    };
    let group = |value| nodes(value, "between");
    let any = match members.get("any") {
        None => Vec::new(),
        Some(Value::Array(list)) => {
            let condition = |(index, value): (usize, &Value)| {
                read_condition(value, &format!("{path}.any[{index}]"))
            };
            list.iter().enumerate().map(condition).collect::<Result<_, _>>()?
        }
        Some(_) => return Err(RuleError::invalid(members.at("any"), "a list of conditions")),
    };
    let not = members.get("not").map(|not| read_condition(not, &members.at("not"))).transpose()?;
    Ok(Condition {
        opcodes: each("opcode").map(opcode).collect::<Result<_, _>>()?,
        vbuckets: each("vbucket").map(vbucket).collect::<Result<_, _>>()?,
        connection: read_connection(&members)?,
        node: members.size("node")?,
        between: each("between").map(group).collect::<Result<_, _>>()?,
        from: members.get("from").map_or(Ok(Vec::new()), |from| nodes(from, "from"))?,
        direction: read_direction(&members)?,
        any,
        not: not.map(Box::new),
        nth: members.count("nth")?,
        every: members.count("every")?,
        probability: read_probability(&members)?,
    })
}

fn read_connection(members: &Members<'_>) -> Result<Option<ConnectionIs>, RuleError> {
    Ok(match members.get("connection") {
        None => None,
        Some(Value::String(name)) => Some(ConnectionIs::Named(name.clone())),
        Some(_) => members.count("connection")?.map(|nth| ConnectionIs::Nth(nth.get())),
    })
}

fn read_direction(members: &Members<'_>) -> Result<Option<Direction>, RuleError> {
    let Some(name) = members.text("direction")? else {
        return Ok(None);
    };
    let found = Direction::ALL.into_iter().find(|direction| direction.name() == name);
    let known = Direction::ALL.map(Direction::name);
    found.map(Some).ok_or_else(|| unknown(&members.at("direction"), "direction", name, known))
}

fn read_probability(members: &Members<'_>) -> Result<Option<Probability>, RuleError> {
    let seed = members.number("seed")?;
    let Some(value) = members.get("probability") else {
        return match seed {
            // The corrupted byte is random as well, even if packets are not chosen at random.
            Some(seed) => Ok(Some(Probability { of: 1.0, seed })),
            None => Ok(None),
        };
    };
    let expected = "a number from 0 to 1";
    let of =
        value.as_f64().ok_or_else(|| RuleError::invalid(members.at("probability"), expected))?;
    Ok(Some(Probability { of, seed: seed.unwrap_or_default() }))
}

fn read_opcode(value: &Value, path: &str) -> Result<Opcode, RuleError> {
    if let Some(number) = value.as_u64().and_then(|number| u8::try_from(number).ok()) {
        return Ok(Opcode(number));
    }
    let expected = "a name as DCP_MUTATION, a number up to 255, or a list of them";
    let name = value.as_str().ok_or_else(|| RuleError::invalid(path, expected))?;
    let named = |opcode: &&Opcode| opcode.name().is_some_and(|own| own.eq_ignore_ascii_case(name));
    Opcode::KNOWN.iter().find(named).copied().ok_or_else(|| {
        unknown(path, "opcode", name, Opcode::KNOWN.iter().filter_map(|opcode| opcode.name()))
    })
}

fn read_status(value: &Value, path: &str) -> Result<Status, RuleError> {
    if let Some(number) = value.as_u64().and_then(|number| u16::try_from(number).ok()) {
        return Ok(Status(number));
    }
    let expected = "a name as ETMPFAIL or a number up to 65535";
    let name = value.as_str().ok_or_else(|| RuleError::invalid(path, expected))?;
    let named = |status: &&Status| status.name().is_some_and(|own| own.eq_ignore_ascii_case(name));
    Status::KNOWN.iter().find(named).copied().ok_or_else(|| {
        unknown(path, "status", name, Status::KNOWN.iter().filter_map(|status| status.name()))
    })
}

/// The name of a reaction and its argument: `"drop"`, or `{"delay": {"seconds": 1}}`.
fn named_reaction<'a>(value: &'a Value, path: &str) -> Result<(&'a str, &'a Value), RuleError> {
    const NONE: &Value = &Value::Null;
    let (name, argument) = match value {
        Value::String(name) => (name, NONE),
        Value::Object(members) if members.len() == 1 => {
            members.iter().next().ok_or_else(|| RuleError::invalid(path, "a reaction"))?
        }
        _ => {
            let expected = "a name, or an object of one name and its arguments";
            return Err(RuleError::invalid(path, expected));
        }
    };
    Ok((name.as_str(), argument))
}

fn read_reaction(value: &Value, path: &str) -> Result<Reaction, RuleError> {
    let (name, argument) = named_reaction(value, path)?;
    if !REACTIONS.contains(&name) {
        return Err(unknown(path, "reaction", name, REACTIONS.iter().copied()));
    }
    let path = &format!("{path}.{name}");
    let empty = Value::Object(Map::new());
    let argument = if argument.is_null() { &empty } else { argument };
    let members = |known| Members::new(argument, path, "argument", known);
    Ok(match name {
        "delay" => Reaction::Delay(read_seconds(&members(&["seconds"])?)?),
        "disconnect_after" => {
            let members = members(&["bytes"])?;
            let bytes = members.size("bytes")?.ok_or_else(|| members.missing("bytes"))?;
            Reaction::DisconnectAfter(bytes)
        }
        "answer" => {
            let members = members(&["status"])?;
            let status = members.get("status").ok_or_else(|| members.missing("status"))?;
            Reaction::Answer(read_status(status, &members.at("status"))?)
        }
        "not_my_vbucket" => {
            let members = members(&["map"])?;
            let map = members.get("map").map_or(Some(true), Value::as_bool);
            let expected = "true or false";
            let map = map.ok_or_else(|| RuleError::invalid(members.at("map"), expected))?;
            Reaction::NotMyVbucket { map }
        }
        "rollback" => {
            let members = members(&["seqno"])?;
            Reaction::Rollback(Seqno(members.number("seqno")?.unwrap_or_default()))
        }
        "items_past_end" => {
            let count = members(&["items"])?.number("items")?;
            Reaction::ItemsPastEnd(count.unwrap_or(u64::MAX))
        }
        "oso_cut" => Reaction::OsoCut(members(&["items"])?.number("items")?.unwrap_or_default()),
        "truncate" => Reaction::Truncate(members(&["bytes"])?.size("bytes")?),
        "lag" => {
            let members = members(&["changes"])?;
            let changes = members.number("changes")?;
            Reaction::Lag(changes.ok_or_else(|| members.missing("changes"))?)
        }
        "window" => {
            let members = members(&["bytes"])?;
            let bytes = members.count("bytes")?.ok_or_else(|| members.missing("bytes"))?;
            let bytes = NonZeroU32::try_from(bytes);
            let expected = "a number of bytes from 1 to 4294967295";
            Reaction::Window(bytes.map_err(|_| RuleError::invalid(members.at("bytes"), expected))?)
        }
        "corrupt" => Reaction::Corrupt(members(&["offset"])?.size("offset")?),
        _ => {
            members(&[])?;
            without_arguments(name)
        }
    })
}

fn without_arguments(name: &str) -> Reaction {
    match name {
        "half_open" => Reaction::HalfOpen,
        "disconnect" => Reaction::Disconnect,
        "no_stream_end" => Reaction::NoStreamEnd,
        "no_snapshot_end" => Reaction::NoSnapshotEnd,
        "marker_without_items" => Reaction::MarkerWithoutItems,
        "seqno_advanced_before_item" => Reaction::SeqnoAdvancedBeforeItem,
        "no_noop" => Reaction::NoNoop,
        _ => Reaction::Drop,
    }
}

fn read_seconds(members: &Members<'_>) -> Result<Duration, RuleError> {
    let seconds = members.get("seconds").ok_or_else(|| members.missing("seconds"))?;
    let duration = seconds.as_f64().and_then(|number| Duration::try_from_secs_f64(number).ok());
    duration.ok_or_else(|| RuleError::invalid(members.at("seconds"), "a number of seconds"))
}

fn write_reaction(reaction: Reaction) -> Value {
    let seconds = |delay: Duration| json!({"seconds": delay.as_secs_f64()});
    match reaction {
        Reaction::Drop => json!("drop"),
        Reaction::Delay(delay) => json!({"delay": seconds(delay)}),
        Reaction::HalfOpen => json!("half_open"),
        Reaction::Disconnect => json!("disconnect"),
        Reaction::DisconnectAfter(bytes) => json!({"disconnect_after": {"bytes": bytes}}),
        Reaction::Answer(status) => {
            let name = status.name().map_or_else(|| json!(status.0), Value::from);
            json!({"answer": {"status": name}})
        }
        Reaction::NotMyVbucket { map } => json!({"not_my_vbucket": {"map": map}}),
        Reaction::Rollback(seqno) => json!({"rollback": {"seqno": seqno.0}}),
        Reaction::NoStreamEnd => json!("no_stream_end"),
        Reaction::NoSnapshotEnd => json!("no_snapshot_end"),
        Reaction::ItemsPastEnd(items) => json!({"items_past_end": {"items": items}}),
        Reaction::MarkerWithoutItems => json!("marker_without_items"),
        Reaction::SeqnoAdvancedBeforeItem => json!("seqno_advanced_before_item"),
        Reaction::OsoCut(items) => json!({"oso_cut": {"items": items}}),
        Reaction::Truncate(bytes) => json!({"truncate": {"bytes": bytes}}),
        Reaction::Corrupt(offset) => json!({"corrupt": {"offset": offset}}),
        Reaction::NoNoop => json!("no_noop"),
        Reaction::Lag(changes) => json!({"lag": {"changes": changes}}),
        Reaction::Window(bytes) => json!({"window": {"bytes": bytes}}),
    }
}

fn write_condition(condition: &Condition) -> Value {
    let opcode = |opcode: &Opcode| opcode.name().map_or_else(|| json!(opcode.0), Value::from);
    let mut members = Map::new();
    let mut set = |name: &str, value: Value| {
        if !value.is_null() && value.as_array().is_none_or(|list| !list.is_empty()) {
            members.insert(name.to_owned(), value);
        }
    };
    set("opcode", condition.opcodes.iter().map(opcode).collect());
    set("vbucket", condition.vbuckets.iter().map(|vbid| vbid.0).collect());
    match &condition.connection {
        Some(ConnectionIs::Nth(nth)) => set("connection", json!(nth)),
        Some(ConnectionIs::Named(name)) => set("connection", json!(name)),
        None => {}
    }
    set("node", json!(condition.node));
    set("between", json!(condition.between));
    set("from", json!(condition.from));
    set("direction", json!(condition.direction.map(Direction::name)));
    set("any", condition.any.iter().map(write_condition).collect());
    set("not", condition.not.as_deref().map_or(Value::Null, write_condition));
    set("nth", json!(condition.nth));
    set("every", json!(condition.every));
    set("probability", json!(condition.probability.map(|chance| chance.of)));
    set("seed", json!(condition.probability.map(|chance| chance.seed)));
    Value::Object(members)
}

impl Serialize for Rule {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut rule = Map::new();
        if !self.name.is_empty() {
            rule.insert("name".to_owned(), json!(self.name));
        }
        rule.insert("condition".to_owned(), write_condition(&self.condition));
        rule.insert("reaction".to_owned(), write_reaction(self.reaction));
        rule.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Rule {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let value = Value::deserialize(deserializer)?;
        read_rule(&value, "rule").map_err(D::Error::custom)
    }
}

/// The name in `known` with the smallest edit distance to the first 64 characters of `name`.
fn nearest<'a>(name: &str, known: impl IntoIterator<Item = &'a str>) -> String {
    let name = name.chars().take(64).collect::<String>().to_lowercase();
    let edits = |known: &&str| strsim::levenshtein(&name, &known.to_lowercase());
    known.into_iter().min_by_key(edits).unwrap_or_default().to_owned()
}
