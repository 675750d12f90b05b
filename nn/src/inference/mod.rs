//! Inference: a model's forward pass without gradients, in one piece or in pipeline stages, and decoding token by token.

pub mod inference_model;
pub mod decoding;
