#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| dcp_fuzz::framing(data));
