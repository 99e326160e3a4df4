//! The committed corpora, replayed through the functions that libFuzzer calls.
//!
//! The only test of its program: others would allocate while it counts what a target holds.

use dcp_fuzz::{TARGETS, corpora};

#[test]
fn no_input_of_a_corpus_does_harm() {
    let corpora = corpora();
    for (name, target) in TARGETS {
        let inputs = &corpora[*name];
        assert!(inputs.len() >= 10, "{name} has a corpus of {} inputs", inputs.len());
        for (file, input) in inputs {
            // libFuzzer's own way of running one, after `scripts/fuzz.py unpack`:
            // cargo fuzz run NAME fuzz/corpus/NAME/FILE
            let outcome = std::panic::catch_unwind(|| target(input));
            assert!(outcome.is_ok(), "{name} fails with fuzz/corpus/{name}/{file}");
        }
        // Nothing, and what is all the same.
        target(&[]);
        for byte in 0..=u8::MAX {
            target(&[byte; 200]);
        }
    }
}
