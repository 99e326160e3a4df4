//! Rules of faults as text: what is refused, and that nothing is lost by writing them.

use dcp_producer::parse_rules;

#[test]
fn fault_names_that_are_unknown_are_refused_with_the_nearest() {
    for (rules, message) in [
        ("{", "the fault rules are not JSON"),
        ("{}", "rules: must be a list of objects"),
        (r#"[{}]"#, r#"[0]: "reaction" is missing"#),
        (r#"[{"reaction": "dropp"}]"#, r#"no reaction "dropp"; did you mean "drop"?"#),
        (
            r#"[{"reaction": "drop"}, {"condition": {"opcod": 1}, "reaction": "drop"}]"#,
            r#"[1].condition: there is no condition "opcod"; did you mean "opcode"?"#,
        ),
        (
            r#"[{"condition": {"opcode": "DCP_MUTATOIN"}, "reaction": "drop"}]"#,
            r#"no opcode "DCP_MUTATOIN"; did you mean "DCP_MUTATION"?"#,
        ),
        (
            r#"[{"reaction": {"answer": {"status": "ETMPFIAL"}}}]"#,
            r#"no status "ETMPFIAL"; did you mean "ETMPFAIL"?"#,
        ),
        (
            r#"[{"condition": {"direction": "to-client"}, "reaction": "drop"}]"#,
            r#"did you mean "to_client"?"#,
        ),
        (r#"[{"reaction": {"delay": {"second": 1}}}]"#, r#"did you mean "seconds"?"#),
        (r#"[{"reaction": {"delay": {"seconds": -1}}}]"#, "must be a number of seconds"),
        (r#"[{"reaction": {"delay": {"seconds": 1e6}}}]"#, "at most a day"),
        (r#"[{"condition": {"nth": 0}, "reaction": "drop"}]"#, "a whole number from 1 up"),
        (r#"[{"condition": {"vbucket": 65536}, "reaction": "drop"}]"#, "a vBucket or a list"),
        (r#"[{"condition": {"probability": 2}, "reaction": "drop"}]"#, "a number from 0 to 1"),
        (
            r#"[{"condition": {"not": {"nth": 1}}, "reaction": "drop"}]"#,
            "[0].condition.not: must be without nth",
        ),
        (
            r#"[{"condition": {"direction": "to_client"}, "reaction": "not_my_vbucket"}]"#,
            r#"[0].condition.direction: must be "to_server" for this reaction"#,
        ),
        (
            r#"[{"condition": {"between": [0]}, "reaction": "half_open"}]"#,
            "[0].condition.between: must be two or more groups of nodes, each node in one",
        ),
        (r#"[{"condition": {"between": [[0], [1, 0]]}, "reaction": "half_open"}]"#, "each node in"),
        (r#"[{"condition": {"between": [[0], []]}, "reaction": "half_open"}]"#, "two or more"),
        (r#"[{"condition": {"between": [0, "1"]}, "reaction": "half_open"}]"#, "must be nodes or"),
        (
            r#"[{"condition": {"between": [0, 1], "nth": 1}, "reaction": "half_open"}]"#,
            "[0].condition: must be without members other than from and vbucket beside between",
        ),
        (
            r#"[{"condition": {"any": [{"between": [0, 1]}]}, "reaction": "half_open"}]"#,
            "[0].condition.any[0]: must be without nth",
        ),
        (
            r#"[{"condition": {"between": [0, 1]}, "reaction": "truncate"}]"#,
            "[0].reaction: must be disconnect, half_open, lag or window with between",
        ),
        (
            r#"[{"reaction": {"lag": {"changes": 1}}}]"#,
            "[0].condition: must be with between for this reaction",
        ),
        (r#"[{"condition": {"from": 1}, "reaction": "drop"}]"#, "must be left out without between"),
        (
            r#"[{"condition": {"between": [0, 1]}, "reaction": {"window": {"bytes": 4294967296}}}]"#,
            "a number of bytes from 1 to 4294967295",
        ),
        (
            r#"[{"condition": {"between": [0, 1]}, "reaction": {"lag": {}}}]"#,
            r#""changes" is missing"#,
        ),
    ] {
        let error = parse_rules(rules).unwrap_err().to_string();
        assert!(error.contains(message), "{error:?} does not say {message:?}");
    }
}

#[test]
fn fault_rules_survive_being_written_and_read() {
    let rules = parse_rules(
        r#"[{"name": "a", "condition": {"opcode": ["DCP_MUTATION", 250], "vbucket": [1, 2],
             "connection": "spark*", "node": 1, "direction": "to_client", "nth": 3, "every": 2,
             "any": [{"connection": 3}, {"vbucket": 1}], "not": {"node": 2},
             "probability": 0.25, "seed": 9}, "reaction": "drop"},
            {"reaction": {"delay": {"seconds": 1.5}}}, {"reaction": "half_open"},
            {"reaction": "disconnect"}, {"reaction": {"disconnect_after": {"bytes": 7}}},
            {"reaction": {"answer": {"status": 4242}}}, {"reaction": "not_my_vbucket"},
            {"reaction": {"not_my_vbucket": {"map": false}}}, {"reaction": "rollback"},
            {"reaction": "no_stream_end"}, {"reaction": "no_snapshot_end"},
            {"reaction": "items_past_end"},
            {"reaction": "marker_without_items"}, {"reaction": "seqno_advanced_before_item"},
            {"reaction": {"oso_cut": {"items": 3}}}, {"reaction": "truncate"},
            {"reaction": {"corrupt": {"offset": 4}}}, {"reaction": "no_noop"},
            {"condition": {"between": [0, [1, 2]], "from": 1, "vbucket": 3},
             "reaction": {"lag": {"changes": 3}}},
            {"condition": {"between": [[0], [1]]}, "reaction": {"window": {"bytes": 4294967295}}}]"#,
    )
    .unwrap();
    let text = serde_json::to_string(&rules).unwrap();
    assert_eq!(parse_rules(&text).unwrap(), rules);
    let read: Vec<dcp_producer::Rule> = serde_json::from_str(&text).unwrap();
    assert_eq!(read, rules);
}
