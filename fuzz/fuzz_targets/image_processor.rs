#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| moeflux_fuzz::read("image_processor", bytes));
