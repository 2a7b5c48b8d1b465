//! Gives the shared library its SONAME, so that a host linked against it finds
//! the same ABI again at run time. Not without exported functions: cargo hands the
//! name on to whatever links this library then.

fn main() {
    println!("cargo:rerun-if-changed=build.rs");
    let target_os = std::env::var("CARGO_CFG_TARGET_OS").unwrap_or_default();
    let exports = std::env::var_os("CARGO_FEATURE_C_ABI").is_some();
    if target_os == "linux" && exports {
        let abi = std::env::var("CARGO_PKG_VERSION_MAJOR").expect("cargo sets the version");
        println!("cargo:rustc-cdylib-link-arg=-Wl,-soname,libllama_sidecar.so.{abi}");
    }
}
