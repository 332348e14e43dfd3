#![no_main]

libfuzzer_sys::fuzz_target!(
    init: remoe_fuzz_harness::start(remoe_fuzz_harness::gateway_data::seeds),
    |data: &[u8]| remoe_fuzz_harness::gateway_data::run(data)
);
