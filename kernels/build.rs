//! Sets the cfg `unoptimized` in builds without optimization, so that `World` can warn that kernels are slow. A dependent inherits no
//! profile of this workspace, so its `cargo run` compiles kernels with `opt-level = 0`.

#![expect(clippy::print_stdout, reason = "a build script talks to cargo by its standard output")]

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rustc-check-cfg=cfg(unoptimized)");
    if std::env::var("OPT_LEVEL").is_ok_and(|level| level == "0") {
        println!("cargo::rustc-cfg=unoptimized");
    }
}
