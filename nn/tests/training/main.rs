//! Models on meshes of threads: same names, same first values, same losses, gradients and steps as on one rank; and the
//! collectives that they cost, counted.

mod support;
mod layers;
mod residuals;
mod gradcheck;
mod composed;
mod names;
mod lines;
mod parity;
mod rounds;
mod traces;
mod llama;
mod context;
mod experts;
mod reading;
mod steps;
mod optimizers;
mod mixed;
mod scaled;
mod drawn;
mod folders;
mod saves;
mod resumed;
mod bad_files;
mod checksums;
mod fuzz;
