// Stands before the source of every kernel. No header is included: NVRTC needs none, and neither does the host.

typedef long long i64;
typedef unsigned char u8;
