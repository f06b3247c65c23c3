"""Prompts: what the end-to-end bench asks, so that every record asks the same.

In: nothing. Out: `PROMPTS`, user messages of varied length; a chat template is put around them.
"""

from __future__ import annotations

PROMPTS: tuple[str, ...] = (
    "What is the capital of France?",
    "Explain in three sentences why the sky is blue.",
    "Write a short poem about a lighthouse keeper who is afraid of the dark.",
    "List five uses for an old bicycle tyre.",
    "Give me a recipe for lentil soup, with quantities for four people.",
    "How does a binary search find a word in a dictionary? Walk me through an example.",
    "Summarise the plot of Romeo and Juliet for a ten-year-old.",
    "A train leaves at 9:15 and arrives at 11:40. How long is the journey, and how do you know?",
    "Write a polite e-mail to a neighbour whose dog barks at night. Mention that we like the dog.",
    "What are the main differences between a frog and a toad?",
    "Describe the water cycle, from a puddle on the street back to a puddle on the street.",
    "Translate into French: the museum is closed on Mondays, but the garden is open.",
    "Name three inventions of the nineteenth century and say who needed them most.",
    "Why do we have leap years? Please mention the rule about centuries as well.",
    "Write a function in Python that returns the second largest number of a list, and explain it.",
    "I have two hours in an unknown city, no map and no telephone. What should I do first, and why?",
    "How do bees find their way home?",
    "What does a conductor of an orchestra do during a rehearsal that is not seen at the concert?",
    "Give me ten words that rhyme with light.",
    "Explain to a beginner what a database index is, with a picture from daily life.",
    "Write the opening paragraph of a detective story that takes place in a bakery.",
    "Which planets can be seen without a telescope, and when is the best time to look for each?",
    "What is the difference between weather and climate?",
    "Draft a weekly training plan for somebody who wants to run five kilometres for the first time.",
    "How is glass made?",
    "Write a dialogue between a map and a compass who disagree about the way.",
    "What should one check before buying a used car? Answer as a short list.",
    "Tell me about the history of the pencil.",
    "Why does bread rise, and what goes wrong when it does not?",
    "Suggest three names for a boat and a reason for each.",
    "Explain compound interest with a sum of 1,000 over three years at five per cent.",
    "What would you pack for a week in the mountains in autumn?",
)
