//! Styles of parallelism combined: training on combinations of styles, chosen pairwise, is training on one rank; and each style issues
//! the collectives that its formulas say.

mod combination;
mod training;
mod pairs;
mod products;
mod collectives;
