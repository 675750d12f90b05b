//! NCCL's types as declared here, compared with `nccl.h` by a C++ compiler, if both are on this machine.

use crate::functions::{
    Config, FLOAT32, FLOAT64, IN_PROGRESS, INT64, MAGIC, MAX, MIN, NO_COLOR, RawUniqueId, SUCCESS, SUM,
    UINT8, UNDEFINED, signatures,
};
use std::fmt::Write as _;
use std::io::Write as _;
use std::mem::offset_of;
use std::path::PathBuf;
use std::process::Command;
use std::{env, fs};

/// Returns `nccl.h` of a Python package, or of the system, or the file that `SHARDGRAD_NCCL_HEADER` names.
fn header() -> Option<PathBuf> {
    let named = env::var_os("SHARDGRAD_NCCL_HEADER").map(PathBuf::from);
    let environment = env::var_os("VIRTUAL_ENV").map(|folder| PathBuf::from(folder).join("lib"));
    let packages = environment.and_then(|lib| fs::read_dir(lib).ok()).into_iter().flatten().flatten();
    let packages = packages.map(|python| python.path().join("site-packages/nvidia/nccl/include/nccl.h"));
    named.into_iter().chain(packages).chain(["/usr/include/nccl.h".into()]).find(|file| file.is_file())
}

/// Returns C++ that compiles only if `nccl.h` declares what the functions of this crate take and return. Enum types are declared as `int`
/// here, so enums are compared as integers of the same size.
fn program() -> String {
    let mut text = String::from(
        "#include \"nccl.h\"\n#include <cstddef>\n#include <type_traits>\n\
         template <class T, bool = std::is_enum<T>::value> struct Plain { typedef T type; };\n\
         template <class T> struct Plain<T, true> { static_assert(sizeof(T) == sizeof(int), \"\"); typedef int type; };\n\
         template <class T> struct Plain<T*, false> { typedef typename Plain<T>::type* type; };\n\
         template <class F> struct Type;\n\
         template <class R, class... A> struct Type<R (*)(A...)> {\n\
         typedef typename Plain<R>::type type(typename Plain<A>::type...); };\n",
    );
    let other = [
        ("ncclGetVersion", "int(int*)".to_string()),
        ("ncclGetErrorString", "const char*(int)".to_string()),
        ("ncclGetLastError", "const char*(ncclComm_t)".to_string()),
    ];
    let all = signatures().into_iter().map(|(name, args)| (name, format!("int({})", args.join(", "))));
    for (name, of) in all.chain(other) {
        let _ = writeln!(
            text,
            "static_assert(std::is_same<Type<decltype(&{name})>::type, {of}>::value, \"{name}\");"
        );
    }
    let fields = [
        ("size", offset_of!(Config, size)),
        ("magic", offset_of!(Config, magic)),
        ("version", offset_of!(Config, version)),
        ("blocking", offset_of!(Config, blocking)),
        ("cgaClusterSize", offset_of!(Config, cga_cluster_size)),
        ("minCTAs", offset_of!(Config, min_ctas)),
        ("maxCTAs", offset_of!(Config, max_ctas)),
        ("netName", offset_of!(Config, net_name)),
        ("splitShare", offset_of!(Config, split_share)),
        ("trafficClass", offset_of!(Config, traffic_class)),
    ];
    for (name, at) in fields {
        let _ = writeln!(text, "static_assert(offsetof(ncclConfig_t, {name}) == {at}, \"{name}\");");
    }
    let _ = writeln!(text, "static_assert(sizeof(ncclConfig_t) >= {}, \"\");", size_of::<Config>());
    let _ = writeln!(text, "static_assert(sizeof(ncclUniqueId) == {}, \"\");", size_of::<RawUniqueId>());
    let numbers = [
        ("ncclSuccess", SUCCESS),
        ("ncclInProgress", IN_PROGRESS),
        ("ncclUint8", UINT8),
        ("ncclInt64", INT64),
        ("ncclFloat32", FLOAT32),
        ("ncclFloat64", FLOAT64),
        ("ncclSum", SUM),
        ("ncclMax", MAX),
        ("ncclMin", MIN),
        ("NCCL_SPLIT_NOCOLOR", NO_COLOR),
    ];
    for (name, value) in numbers {
        let _ = writeln!(text, "static_assert({name} == {value}, \"{name}\");");
    }
    let _ = writeln!(text, "static_assert(NCCL_API_MAGIC == {MAGIC}u, \"\");");
    // The least int is no literal of C++.
    let _ = writeln!(text, "static_assert(NCCL_CONFIG_UNDEF_INT == -{} - 1, \"\");", -(UNDEFINED + 1));
    text
}

/// Returns the compiler's messages about a program; an empty text if it compiles.
fn messages(program: &str, header: &PathBuf) -> String {
    let folder = env::temp_dir().join(format!("shardgrad-nccl-header-{}", std::process::id()));
    fs::create_dir_all(&folder).unwrap();
    // CUDA's headers are not needed for these types.
    fs::write(
        folder.join("cuda_runtime.h"),
        "#include <cstddef>\ntypedef struct CUstream_st *cudaStream_t;\ntypedef struct CUevent_st *cudaEvent_t;\n",
    )
    .unwrap();
    fs::write(folder.join("cuda_fp16.h"), "").unwrap();
    fs::copy(header, folder.join("nccl.h")).unwrap();
    fs::write(folder.join("check.cc"), program).unwrap();
    let flags = ["-std=c++17", "-fsyntax-only", "-w", "-I.", "check.cc"];
    let done = Command::new("g++").args(flags).current_dir(&folder).output().unwrap();
    fs::remove_dir_all(&folder).unwrap();
    if done.status.success() { String::new() } else { String::from_utf8_lossy(&done.stderr).into_owned() }
}

#[test]
fn types_are_those_of_the_header() {
    let compiler = Command::new("g++").arg("--version").output();
    let Some(header) = header().filter(|_| compiler.is_ok()) else {
        let _ = writeln!(std::io::stderr(), "skipped: no nccl.h (SHARDGRAD_NCCL_HEADER), or no g++");
        return;
    };
    let program = program();
    assert_eq!(messages(&program, &header), "");
    // Each kind of difference is found.
    for (right, wrong) in [
        ("ncclUint8 == 1", "ncclUint8 == 2"),
        ("netName) == 32", "netName) == 40"),
        ("int(ncclComm_t, int*)", "int(ncclComm_t*, int*)"),
        (
            "int(const void*, void*, size_t, int, int, ncclComm_t",
            "int(const void*, void*, int, int, int, ncclComm_t",
        ),
        ("const char*(int)", "int(int)"),
    ] {
        assert!(program.contains(right), "{right} in {program}");
        assert!(
            messages(&program.replace(right, wrong), &header).contains("static assertion failed"),
            "{wrong}"
        );
    }
}
