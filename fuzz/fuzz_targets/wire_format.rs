//! Decodes arbitrary bytes as everything that a process reads from its connections.

#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    let _ = shardgrad_dist::decode_untrusted(bytes);
});
