use super::*;

fn named(names: &[&str]) -> TableOptions {
    TableOptions {
        columns: Columns::Named(names.iter().map(ToString::to_string).collect()),
        ..TableOptions::default()
    }
}

fn names(options: &TableOptions) -> Vec<&'static str> {
    let schema = TableSchema::new(options).unwrap();
    schema.columns().iter().map(|column| column.name()).collect()
}

#[test]
fn column_sets_are_those_of_the_documentation() {
    let basic = [
        "op",
        "key",
        "value",
        "scope",
        "collection",
        "vbucket",
        "seqno",
        "epoch",
        "cas",
        "timestamp",
    ];
    assert_eq!(names(&TableOptions::default()), basic);
    let full = TableOptions { columns: Columns::Full, ..TableOptions::default() };
    let more = [
        "rev",
        "expiry",
        "deleted_at",
        "flags",
        "datatype",
        "vbuuid",
        "snapshot_start",
        "snapshot_end",
    ];
    assert_eq!(names(&full), [&basic[..], &more[..]].concat());
    let names = names(&TableOptions { include_xattrs: true, history: true, ..full });
    assert_eq!(names[names.len() - 2..], ["history", "xattrs"]);
}

#[test]
fn column_types_are_those_of_spark_never_unsigned_or_dictionaries() {
    let all: Vec<&str> = COLUMNS.iter().map(|spec| spec.name).collect();
    let schema = TableSchema::new(&named(&all)).unwrap().arrow();
    let nullable: Vec<_> =
        schema.fields().iter().filter(|f| !f.is_nullable()).map(|f| f.name().as_str()).collect();
    assert_eq!(nullable, ["op", "vbucket", "seqno", "epoch"]);
    for field in schema.fields() {
        let expected = match field.name().as_str() {
            "op" | "key" | "scope" | "collection" | "datatype" => "Utf8",
            "value" => "Binary",
            "vbucket" | "epoch" => "Int32",
            "history" => "Boolean",
            "timestamp" | "expiry" | "deleted_at" => "Timestamp(µs, \"UTC\")",
            "xattrs" => {
                "Map(\"entries\": non-null Struct(\"key\": non-null Utf8, \"value\": Utf8), unsorted)"
            }
            _ => "Int64",
        };
        assert_eq!(field.data_type().to_string(), expected, "{}", field.name());
    }
}

#[test]
fn projection_keeps_its_order() {
    assert_eq!(names(&named(&["seqno", "key"])), ["seqno", "key"]);
    let binary = TableOptions { key_type: KeyType::Binary, ..named(&["key"]) };
    let schema = TableSchema::new(&binary).unwrap();
    assert_eq!(schema.arrow().field(0).data_type(), &DataType::Binary);
}

#[test]
fn column_names_that_are_unknown_are_named_in_the_error() {
    let error = |options| TableSchema::new(&options).unwrap_err().to_string();
    assert_eq!(error(named(&["Seq_no"])), "there is no column \"Seq_no\"; did you mean \"seqno\"?");
    for name in ["name", "nme", "foo", ""] {
        assert_eq!(
            error(named(&[name])),
            format!(
                "there is no column {name:?}: a field of documents needs a document schema that declares it"
            )
        );
    }
    assert_eq!(error(named(&["op", "op"])), "\"op\" is named twice");
    assert_eq!(error(named(&[])), "name at least one column");
}

fn decoded(schema: &str) -> TableOptions {
    let document_schema = Some(DocumentSchema::parse(schema).unwrap());
    TableOptions { document_schema, ..TableOptions::default() }
}

fn all_names(options: &TableOptions) -> Vec<String> {
    TableSchema::new(options).unwrap().names().map(str::to_owned).collect()
}

#[test]
fn document_columns_stand_for_the_value() {
    let options = decoded("name STRING, geo STRUCT<lat: DOUBLE>");
    let names = all_names(&options);
    assert_eq!(names[..2], ["op", "key"]);
    assert_eq!(names[names.len() - 3..], ["name", "geo", MALFORMED_FIELDS]);
    assert!(!names.contains(&"value".to_owned()));
    let schema = TableSchema::new(&options).unwrap();
    assert!(schema.needs(Column::Value) && !schema.has(Column::Value));
    assert!(schema.needs(Column::Datatype) && !schema.needs(Column::Xattrs));

    let with_value = TableOptions { value_format: ValueFormat::String, ..options.clone() };
    assert!(all_names(&with_value).contains(&"value".to_owned()));
    let malformed = TableOptions { on_malformed: OnMalformed::Column, ..options.clone() };
    assert_eq!(all_names(&malformed)[names.len() - 2..], ["geo", MALFORMED]);
    let fails = TableOptions { on_malformed: OnMalformed::Fail, ..options.clone() };
    assert_eq!(all_names(&fails)[names.len() - 2..], ["geo"]);
    let prefixed = TableOptions { document_prefix: "doc_".to_owned(), ..options };
    assert_eq!(all_names(&prefixed)[names.len() - 2..], ["doc_geo", MALFORMED_FIELDS]);
}

#[test]
fn document_columns_can_be_named_among_others() {
    let options = |columns: &[&str]| TableOptions {
        columns: Columns::Named(columns.iter().map(ToString::to_string).collect()),
        on_malformed: OnMalformed::Column,
        ..decoded("a INT, b ARRAY<INT>")
    };
    let names = ["b", "seqno", "_malformed", "value"];
    let schema = TableSchema::new(&options(&names)).unwrap();
    assert_eq!(schema.names().collect::<Vec<_>>(), names);
    assert_eq!(schema.columns(), [Column::Seqno, Column::Value]);
    let error = |columns: &[&str]| TableSchema::new(&options(columns)).unwrap_err().to_string();
    assert_eq!(error(&["b", "b"]), "\"b\" is named twice");
    assert!(error(&["bb"]).contains("did you mean \"b\"?"));
}

#[test]
fn document_columns_stand_behind_names_that_are_none_of_theirs() {
    let names = |columns: &[&str], on_malformed| {
        all_names(&TableOptions {
            columns: named(columns).columns,
            on_malformed,
            ..decoded("a INT, b ARRAY<INT>")
        })
    };
    let all = ["seqno", "key", "a", "b", MALFORMED_FIELDS];
    assert_eq!(names(&["seqno", "key"], OnMalformed::Null), all);
    assert_eq!(names(&["b", "key"], OnMalformed::Null), ["b", "key"]);
    assert_eq!(
        names(&["key", "b", MALFORMED_FIELDS], OnMalformed::Null),
        ["key", "b", MALFORMED_FIELDS]
    );
    assert_eq!(names(&[MALFORMED_FIELDS, "key"], OnMalformed::Null), [MALFORMED_FIELDS, "key"]);
    assert_eq!(names(&["key"], OnMalformed::Column), ["key", "a", "b", MALFORMED]);
    assert_eq!(names(&["b"], OnMalformed::Column), ["b", MALFORMED]);
    assert_eq!(names(&[MALFORMED], OnMalformed::Column), [MALFORMED]);
}

#[test]
fn table_options_that_contradict_each_other_are_refused() {
    let error = |options: &TableOptions| TableSchema::new(options).unwrap_err().to_string();
    let default = TableOptions::default();
    let columns = |names: &[&str]| named(names).columns;
    for (options, said) in [
        (
            TableOptions { document_prefix: "d".to_owned(), ..default.clone() },
            "a prefix needs a schema",
        ),
        (
            TableOptions { on_malformed: OnMalformed::Fail, ..default.clone() },
            "documents are not decoded",
        ),
        (
            TableOptions {
                columns: columns(&["key"]),
                value_format: ValueFormat::String,
                ..default.clone()
            },
            "a format applies to the column value",
        ),
        (
            TableOptions { columns: columns(&["_malformed", "a"]), ..decoded("a INT") },
            "\"_malformed\" needs 'column'",
        ),
        (
            TableOptions { columns: columns(&["_malformed_fields"]), ..default.clone() },
            "\"_malformed_fields\" needs a schema of documents and 'null'",
        ),
        (
            TableOptions {
                columns: columns(&["_malformed_fields"]),
                on_malformed: OnMalformed::Fail,
                ..decoded("a INT")
            },
            "\"_malformed_fields\" needs a schema of documents and 'null'",
        ),
        (decoded("_Malformed_fields STRING"), "would appear twice"),
        (decoded("Timestamp STRING"), "give a prefix, such as doc_"),
        (decoded("_malformed STRING"), "would appear twice"),
    ] {
        assert!(error(&options).contains(said), "{}", error(&options));
    }
    let prefixed =
        TableOptions { document_prefix: "doc_".to_owned(), ..decoded("timestamp STRING") };
    assert!(all_names(&prefixed).contains(&"doc_timestamp".to_owned()));
}
