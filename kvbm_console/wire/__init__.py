"""The wire: batches, the two encodings, generated messages. Protobuf stays behind these modules."""
